#!/usr/bin/env python3
"""Build Horovod, and train/processes/allreduce.cc with it, for the MXNet of the Python that runs this script:
build_horovod.py FOLDER

scripts/setup.sh runs this script in the new environment. FOLDER keeps sources and compiled objects, so that a repeated
call does only the remaining work. This script needs only g++. Horovod's own build requires CMake older than 4. For GPUs
it also requires a CUDA toolkit with nvcc, for kernels that this project never calls (HOROVOD_KERNELS). CUDA's headers
come from NVIDIA's wheels, which are kept in FOLDER, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parents[1]
VERSION = "0.28.1"
LIBRARY = "mpi_lib" + str(sysconfig.get_config_var("EXT_SUFFIX"))
BUCKET_LIBRARY = "bucket_allreduce.so"  # as in train/processes/allreduce.py
# CUDA 12's static runtime, which runs with drivers for CUDA 12 and newer, and its headers, which need `crt/` and `nv/`.
CUDA_WHEELS = ("nvidia-cuda-runtime-cu12==12.9.79", "nvidia-cuda-nvcc-cu12==12.9.86", "nvidia-cuda-cccl-cu12==12.9.27")
CONTROL_GROUP = Path("/sys/fs/cgroup")
BYTES_PER_COMPILER = 0.8e9  # memory of one compiler; the largest part takes 0.64e9 bytes (g++ 12)

# Headers that g++'s other headers included until version 13 (cstdint: until 15).
INCLUDED = (
    ("horovod/common/common.h", "stdexcept"),
    ("horovod/common/group_table.h", "string"),
    ("third_party/gloo/gloo/types.h", "cstdint"),
)
REPLACED = (
    # An assignment to a constant, which g++ accepted before version 14.
    ("third_party/flatbuffers/include/flatbuffers/stl_emulation.h", "const size_type count_;", "size_type count_;"),
    # A name that is read after the operation may have ended and freed it; runs with one process often crashed because
    # of this.
    ("horovod/mxnet/mpi_ops.cc", "ops_param->op_names[0]", "std::string(ops_param->op_names[0])"),
    # Only driver packages for developers contain the file without a version number.
    ("horovod/mxnet/cuda_util.cc", '"libcuda.so"', '"libcuda.so.1"'),

    # Errors after the loss of a process. MXNet records the errors of its operations without a lock, and simultaneous
    # failures have corrupted the heap. So operations complete without an error here, and Python asks for the first
    # failure after each wait (train/processes/horovod_mxnet.py). In a program that never asks, MXNet reports errors as
    # before.
    ("horovod/mxnet/mpi_ops.cc", "inline void InvokeCompleteCallback(", """\
static std::atomic_bool keeps_failures{false};
static std::mutex failure_mutex;
static std::string failure;
extern "C" void horovod_mxnet_keep_failures() { keeps_failures = true; }
// The first reason for which an operation has failed since it was last forgotten, or null; valid until this thread's
// next call.
extern "C" const char* horovod_mxnet_failure() {
  static thread_local std::string copy;
  std::lock_guard<std::mutex> guard(failure_mutex);
  copy = failure;
  return copy.empty() ? nullptr : copy.c_str();
}
extern "C" void horovod_mxnet_forget_failure() {
  std::lock_guard<std::mutex> guard(failure_mutex);
  failure.clear();
}

inline void InvokeCompleteCallback("""),
    ("horovod/mxnet/mpi_ops.cc", """\
    auto error = dmlc::Error(status.reason());
    on_complete(&error);
""", """\
    if (keeps_failures) {
      {
        std::lock_guard<std::mutex> guard(failure_mutex);
        if (failure.empty()) failure = status.reason().empty() ? "unknown" : status.reason();
      }
      on_complete();
      return;
    }
    auto error = dmlc::Error(status.reason());
    on_complete(&error);
"""),
    # Operations that Horovod no longer accepts also complete without an error. They would otherwise throw in MXNet's
    # thread.
    ("horovod/mxnet/mpi_ops.cc", """\
  ThrowIfError(common::CheckInitialized());

  auto on_complete = *static_cast<CallbackOnComplete*>(on_complete_ptr);
""", """\
  auto on_complete = *static_cast<CallbackOnComplete*>(on_complete_ptr);
  const Status initialized = common::CheckInitialized();
  if (!initialized.ok()) {
    InvokeCompleteCallback(on_complete, initialized);
    return;
  }
"""),
    ("horovod/mxnet/mpi_ops.cc", "ThrowIfError(enqueue_result);",
     "if (!enqueue_result.ok()) InvokeCompleteCallback(on_complete, enqueue_result);"),
    # An operation that Gloo aborts leaves its connections in the middle of a message. Horovod then began the next
    # operation, and this operation waited until Gloo's time-out for a process that was still waiting in the first
    # operation. Now Horovod ends at once.
    ("horovod/common/operations.cc", "    status = Status::UnknownError(ex.what());\n", """\
    status = Status::UnknownError(ex.what());
    for (auto& e : entries) {
      timeline.End(e.tensor_name, nullptr);
      e.FinishWithCallback(status);
    }
    if (entries.empty() || entries[0].device == CPU_DEVICE_ID) throw;
    return;
"""),
    # If a process is lost while the processes connect, Gloo throws in Horovod's thread. The exception was not caught,
    # and aborted the process. Now Python gets the error, and may connect again.
    ("horovod/common/operations.cc", """\
    global_gloo_context.Initialize(ParseGlooIface());
  }
  if (state.control_operation == LibType::GLOO) {
    // Initializes global controller
    state.process_set_table.Initialize(global_gloo_context);
  }
""", """\
    try {
      global_gloo_context.Initialize(ParseGlooIface());
      if (state.control_operation == LibType::GLOO) {
        // Initializes global controller
        state.process_set_table.Initialize(global_gloo_context);
      }
    } catch (const std::exception& ex) {
      LOG(ERROR) << "Horovod could not be initialized: " << ex.what();
      state.process_set_table.Finalize(global_gloo_context, SHUT_DOWN_ERROR);
      global_gloo_context.Finalize();
      state.initialization_failed = true;
      return;
    }
  }
"""),
    ("horovod/common/operations.cc", """\
    horovod_global.initialization_done = false;
    horovod_global.background""", """\
    horovod_global.initialization_done = false;
    horovod_global.initialization_failed = false;
    horovod_global.background"""),
    # An operation enqueued between Horovod's end and the check for that end was never completed.
    ("horovod/common/tensor_queue.h", "  mutable std::mutex mutex_;", """\
  mutable std::mutex mutex_;
  Status ended_ = Status::OK();  // else why nothing is taken any more

public:
  void Begin() {
    std::lock_guard<std::mutex> guard(mutex_);
    ended_ = Status::OK();
  }

protected:"""),
    ("horovod/common/tensor_queue.cc", """\
  std::lock_guard<std::mutex> guard(mutex_);
  for (auto& e : tensor_table_) {
    e.second.FinishWithCallback(status);
""", """\
  std::lock_guard<std::mutex> guard(mutex_);
  ended_ = status;
  for (auto& e : tensor_table_) {
    e.second.FinishWithCallback(status);
"""),
    ("horovod/common/tensor_queue.cc", """\
  std::lock_guard<std::mutex> guard(mutex_);
  if (tensor_table_.find(e.tensor_name)""", """\
  std::lock_guard<std::mutex> guard(mutex_);
  if (!ended_.ok()) return ended_;
  if (tensor_table_.find(e.tensor_name)"""),
    ("horovod/common/tensor_queue.cc", """\
  std::lock_guard<std::mutex> guard(mutex_);

  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (tensor_table_.find""", """\
  std::lock_guard<std::mutex> guard(mutex_);
  if (!ended_.ok()) return ended_;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (tensor_table_.find"""),
    ("horovod/common/process_set.cc", """\
  LOG(TRACE) << "Initializing new process set with Gloo: \"""", """\
  tensor_queue.Begin();
  LOG(TRACE) << "Initializing new process set with Gloo: \""""),
    # The end of a connection throws in Gloo's own thread. Nothing caught the exception, so it ended the process.
    ("third_party/gloo/gloo/transport/tcp/pair.cc", "    handleReadWrite(events);\n", """\
    try {
      handleReadWrite(events);
    } catch (const std::exception&) {
      if (ex_ == nullptr) signalException(std::current_exception());
    }
"""),
    # An operation in the middle of its message was not notified of the connection's end, and waited for the time-out.
    ("third_party/gloo/gloo/transport/tcp/pair.cc", "  // Loop through posted send operations.\n", """\
  auto tell = [&ex](const Op& op) {
    NonOwningPtr<UnboundBuffer> buf(op.ubuf);
    if (buf) buf->signalException(ex);
  };
  tell(rx_);
  for (auto& op : tx_) tell(op);

  // Loop through posted send operations.
"""),
)

# Source files, grouped into parts. A part is compiled as one file, because most of the work is reading headers.
PARTS = {
    "gloo": ("third_party/gloo/gloo", "algorithm allgather allgatherv alltoall alltoallv barrier broadcast "
             "common/linux common/logging context gather gatherv rendezvous/context rendezvous/file_store "
             "rendezvous/hash_store rendezvous/prefix_store rendezvous/store scatter transport/address "
             "transport/buffer transport/context transport/device transport/pair transport/unbound_buffer types"),
    "gloo_reduce": ("third_party/gloo/gloo", "allreduce reduce transport/tcp/address transport/tcp/buffer "
                    "transport/tcp/context transport/tcp/device transport/tcp/error transport/tcp/loop "
                    "transport/tcp/pair transport/tcp/socket transport/tcp/unbound_buffer"),
    "tuning": ("horovod/common", "parameter_manager optim/bayesian_optimization optim/gaussian_process"),
    "common": ("horovod/common", "common fusion_buffer_manager group_table half logging message process_set "
               "response_cache stall_inspector thread_pool timeline tensor_queue utils/env_parser "
               "gloo/gloo_context gloo/gloo_controller gloo/http_store gloo/memory_store"),
    "operations": ("horovod/common", "operations controller ops/collective_operations ops/operation_manager "
                   "ops/gloo_operations"),
    "mxnet": ("horovod/mxnet", "mpi_ops tensor_util cuda_util adapter"),
}
GPU_PARTS = {"gpu": ("horovod/common/ops", "cuda_operations gpu_operations nccl_operations")}
COLLECTIVES = ("ALLREDUCE", "ALLGATHER", "BROADCAST", "ALLTOALL", "REDUCESCATTER")

# Replaces horovod/common/ops/cuda/cuda_kernels.cu, which needs nvcc. Horovod calls its scaling kernels only for
# averages that NCCL does not compute itself.
HOROVOD_KERNELS = """
#include <stdexcept>
#include "horovod/common/ops/cuda/cuda_kernels.h"
namespace horovod {
namespace common {
void BatchedD2DMemcpyCudaImpl(BatchedD2DParams& params, int num_copies, cudaStream_t stream) {
  for (int i = 0; i < num_copies; ++i) {
    cudaError_t fault = cudaMemcpyAsync(params.out[i], params.in[i], params.sizes[i], cudaMemcpyDeviceToDevice, stream);
    if (fault != cudaSuccess) throw std::logic_error(std::string("cudaMemcpyAsync: ") + cudaGetErrorString(fault));
  }
}
static const char* const kNoScaling = "this Horovod was built without nvcc and cannot scale tensors on a GPU";
void ScaleBufferCudaImpl(const void*, void*, const int64_t, double, DataType, cudaStream_t) {
  throw std::logic_error(kNoScaling);
}
void BatchedScaledD2DMemcpyCudaImpl(BatchedD2DParams& params, int num_copies, double scale, DataType,
                                    cudaStream_t stream) {
  if (scale != 1.0) throw std::logic_error(kNoScaling);  // with 1 it joins tensors
  BatchedD2DMemcpyCudaImpl(params, num_copies, stream);
}
}
}
"""
# The configuration that Gloo's CMake would generate: only TCP between machines.
GLOO_CONFIG = """#pragma once
#define GLOO_VERSION_MAJOR 0
#define GLOO_VERSION_MINOR 5
#define GLOO_VERSION_PATCH 0
#define GLOO_VERSION 500
#define GLOO_HAVE_TRANSPORT_TCP 1
"""


class Unit(NamedTuple):
    """A C++ file and its object file."""

    name: str
    text: str
    flags: tuple[str, ...]


class BuildError(Exception):
    """A failure of the build, as one sentence."""


def fetch_source(folder: Path) -> Path:
    """Horovod's source in `folder`, patched for current compilers; unpacked again if the patches have changed."""
    mended = hashlib.sha256(repr((INCLUDED, REPLACED)).encode()).hexdigest()[:8]
    source = folder / f"horovod-{VERSION}-{mended}"
    if not source.exists():
        print("downloading the source of Horovod", flush=True)
        pip("download", "--no-deps", "--no-build-isolation", "--no-binary", "horovod", "-d", str(folder),
            f"horovod=={VERSION}")
        unpacked = folder / "unpacked"
        shutil.rmtree(unpacked, ignore_errors=True)
        with tarfile.open(folder / f"horovod-{VERSION}.tar.gz") as archive:
            # Without a filter Python 3.12 and 3.13 print a warning. Python 3.10 and 3.11 accept a filter only since
            # 3.10.12 and 3.11.4.
            archive.extractall(unpacked, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
        mend(unpacked / f"horovod-{VERSION}")
        for before in filter(Path.is_dir, folder.glob("horovod-*")):
            shutil.rmtree(before)
        (unpacked / f"horovod-{VERSION}").rename(source)
    return source


def mend(source: Path) -> None:
    """Patch the unpacked source. Raises BuildError if it is not the expected source."""
    for name, header in INCLUDED:
        path = source / name
        path.write_text(f"#include <{header}>\n{path.read_text()}")
    for name, old, new in REPLACED:
        path = source / name
        text = path.read_text()
        if old not in text:
            raise BuildError(f"{path} has no {old!r}, so it is not the source of Horovod {VERSION}")
        path.write_text(text.replace(old, new))


def fetch_cuda(folder: Path) -> Path:
    """The folder with the unpacked NVIDIA wheels of CUDA's headers and static runtime."""
    cuda = folder / "cuda"
    if not cuda.exists():
        print("downloading CUDA's headers", flush=True)
        unpacked = folder / "cuda-unpacked"
        shutil.rmtree(unpacked, ignore_errors=True)
        pip("install", "--no-deps", "--no-compile", "--target", str(unpacked), *CUDA_WHEELS)
        for unused in ("bin", "nvvm"):  # unused folders of 100 MB
            shutil.rmtree(unpacked / "nvidia" / "cuda_nvcc" / unused, ignore_errors=True)
        unpacked.rename(cuda)
    return cuda


def pip(*arguments: str) -> None:
    """Run this environment's pip. Raises BuildError if it fails; pip itself prints the reason."""
    command = [sys.executable, "-m", "pip", arguments[0], "--disable-pip-version-check", *arguments[1:]]
    if subprocess.run(command).returncode:
        raise BuildError(f"pip {arguments[0]} failed")


def package(name: str) -> Path:
    """The folder of an installed package. The package is not imported, because a GPU's libmxnet.so needs the driver."""
    found = importlib.util.find_spec(name)
    if not (found and found.submodule_search_locations):
        raise BuildError(f"the package {name} is not installed")
    return Path(next(iter(found.submodule_search_locations)))


def plan(source: Path, mxnet: Path, nccl: Path | None, cuda: Path | None) -> list[Unit]:
    """The units to compile. They have GPU support if `nccl` and `cuda` are given."""
    includes = [f"-I{source}", f"-I{source}/third_party/gloo", f"-I{source.parent}/include"]
    includes += [f"-I{path}" for path in sorted(source.glob("third_party/*/include"))]
    includes += [f"-I{path}" for path in sorted(source.glob("third_party/boost/*/include"))]
    # -isystem only suppresses warnings. MXNet's headers are used without CUDA, because the shared types are identical.
    includes += [f"-I{source}/third_party/eigen", "-isystem", f"{mxnet}/include", "-isystem", f"{mxnet}/include/mkldnn"]
    flags = ["-std=c++14", "-O2", "-ftree-vectorize", "-fPIC", "-pthread", "-DNDEBUG", "-w", "-DEIGEN_MPL2_ONLY=1",
             "-DHAVE_GLOO=1", "-DHOROVOD_CPU_OPERATIONS_DEFAULT=G", "-DMXNET_USE_MKLDNN=1", "-DMXNET_USE_ONEDNN=0",
             "-DMSHADOW_USE_CUDA=0", "-DMSHADOW_USE_MKL=0", "-DMSHADOW_USE_F16C=0",
             f"-fmacro-prefix-map={source}/="]  # messages name files relative to the source, not to this folder
    parts = dict(PARTS)
    if cuda and nccl:
        parts |= GPU_PARTS
        flags += ["-DHAVE_CUDA=1", "-DHAVE_GPU=1", "-DHAVE_NCCL=1"]
        # Horovod reads the letter N as NCCL
        flags += [f"-DHOROVOD_GPU_{operation}={ord('N')}" for operation in COLLECTIVES]
        includes += [f"-isystem{path}" for path in (*sorted(cuda.glob("nvidia/*/include")), nccl / "include")]
    units = [
        Unit(name, "".join(f'#include "{source}/{folder}/{file}.cc"\n' for file in files.split()), (*flags, *includes))
        for name, (folder, files) in parts.items()
    ]
    if cuda:
        units.append(Unit("kernels", HOROVOD_KERNELS, (*flags, *includes)))
    allreduce = (ROOT / "train" / "processes" / "allreduce.cc").read_text()
    return [*units, Unit("allreduce", allreduce, (*flags, "-std=c++17", *includes))]


def compile_unit(unit: Unit, folder: Path) -> Path:
    """Compile `unit` into `folder`, unless its object exists for this text and these flags."""
    source, done, mark = (folder / f"{unit.name}{suffix}" for suffix in (".cc", ".o", ".mark"))
    content = hashlib.sha256(repr(unit).encode()).hexdigest()
    if not (done.exists() and mark.exists() and mark.read_text() == content):
        source.write_text(unit.text)
        unfinished = done.with_suffix(".unfinished")
        run([compiler(), *unit.flags, "-c", str(source), "-o", str(unfinished)])
        unfinished.rename(done)
        mark.write_text(content)
    return done


def compiler() -> str:
    return os.environ.get("CXX", "g++")


def run(command: Sequence[str]) -> None:
    """Run a command. Raises BuildError with the first error of the compiler or linker."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print(done.stdout, flush=True)
        lines = done.stdout.splitlines()
        first = next((line for line in lines if "error: " in line or "undefined reference" in line), None)
        killed = "Killed" in done.stdout or done.returncode < 0
        reason = first or (lines[-1] if lines else f"exit code {done.returncode}")
        raise BuildError(f"{command[0]} was killed, perhaps because memory ran out" if killed else reason)


def num_jobs() -> int:
    """The number of parallel compilers: one per available core, as far as memory allows."""
    return max(1, min(len(os.sched_getaffinity(0)), int(available_memory() / BYTES_PER_COMPILER)))


def available_memory() -> float:
    """Bytes of memory available on the machine, or less if the container's limit is lower."""
    with open("/proc/meminfo") as file:
        free = next(1024.0 * int(line.split()[1]) for line in file if line.startswith("MemAvailable:"))
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # memory limits of control groups, versions 2 and 1
        with contextlib.suppress(OSError, ValueError):  # "max" means no limit
            free = min(free, float((CONTROL_GROUP / name).read_text()))
    return free


def compile_all(units: Sequence[Unit], folder: Path) -> list[Path]:
    """Compile all units, and print the progress. Returns the object files in the order of the units."""
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    objects = {}
    with ThreadPoolExecutor(num_jobs()) as pool:
        jobs = {pool.submit(compile_unit, unit, folder): unit.name for unit in units}
        print(f"compiling {len(units)} parts of Horovod, {num_jobs()} at a time", flush=True)
        try:
            for job in as_completed(jobs):
                objects[jobs[job]] = job.result()
                print(f"compiled {len(objects)} of {len(units)} parts of Horovod "
                      f"({time.monotonic() - begin:.0f} s)", flush=True)
        except BuildError:
            pool.shutdown(cancel_futures=True)
            raise
    return [objects[unit.name] for unit in units]


def link(objects: Sequence[Path], folder: Path, mxnet: Path, nccl: Path | None, cuda: Path | None,
         source: Path) -> tuple[Path, Path]:
    """Link Horovod's library, and the library of allreduce.cc, in `folder`. Returns both paths."""
    *own, allreduce = map(str, objects)
    # The environment's packages, relative to site-packages/horovod/mxnet, because the environment may be moved.
    search = "-Wl,-rpath,$ORIGIN:$ORIGIN/../../mxnet:$ORIGIN/../../nvidia/nccl/lib"
    runtime = []
    if cuda:
        # Each library contains its own hidden copy of CUDA's runtime, because MXNet's has another version.
        (static,) = cuda.glob("nvidia/*/lib/libcudart_static.a")
        runtime = [str(static), "-Wl,--exclude-libs,ALL", "-ldl", "-lrt"]
    library, buckets = folder / LIBRARY, folder / BUCKET_LIBRARY
    shared = [compiler(), "-shared", "-s", "-pthread", search, "-Wl,-z,defs", "-Wl,--allow-shlib-undefined"]
    run([*shared, "-Wl,-Bsymbolic-functions", "-Wl,-z,relro,-z,now", f"-Wl,--version-script={source}/horovod.lds", *own,
         "-o", str(library), f"-L{mxnet}", "-l:libmxnet.so",
         *([str(nccl / "lib" / "libnccl.so.2")] if nccl else []), *runtime])
    run([*shared, "-Wl,-Bsymbolic", allreduce, "-o", str(buckets), f"-L{folder}", f"-l:{LIBRARY}", *runtime])
    return library, buckets


def install(source: Path, libraries: Sequence[Path]) -> None:
    """Install Horovod's Python files with pip, then the libraries that its import needs."""
    pip("install", "--no-compile", "cloudpickle", "psutil", "pyyaml", "packaging", "wheel")
    with environment(HOROVOD_SKIP_COMPILE="1", HOROVOD_WITHOUT_PYTORCH="1"):
        pip("install", "--no-compile", "--no-build-isolation", "--no-deps", str(source))
    importlib.invalidate_caches()
    installed = package("horovod")
    # Horovod compares this version with MXNet's at each import
    (installed / "metadata.json").write_text('{"mxnet": "1.9.1"}\n')
    for library in libraries:
        place = installed / "mxnet" / library.name
        shutil.copy(library, place.with_suffix(".unfinished"))
        place.with_suffix(".unfinished").rename(place)


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Set environment variables for child programs inside the block."""
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def fail(sentence: str) -> NoReturn:
    print(f"error: {sentence}", file=sys.stderr, flush=True)
    sys.exit(2)


def main(arguments: Sequence[str]) -> None:
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return
    if len(arguments) != 1 or arguments[0].startswith("-"):
        fail("usage: scripts/build_horovod.py FOLDER (./-NAME for a folder whose name begins with a dash)")
    folder = Path(arguments[0]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if not shutil.which(compiler()):
            raise BuildError(f"there is no {compiler()}, which compiles it: install g++ (Debian, Ubuntu: apt "
                             "install g++; Fedora: dnf install gcc-c++)")
        mxnet = package("mxnet")
        on_gpu = any(importlib.metadata.distributions(name="mxnet-cu117"))
        nccl = package("nvidia.nccl") if on_gpu else None
        cuda = fetch_cuda(folder) if on_gpu else None
        source = fetch_source(folder)
        include = folder / "include" / "gloo" / "config.h"
        include.parent.mkdir(parents=True, exist_ok=True)
        include.write_text(GLOO_CONFIG)
        build = folder / "build"
        objects = compile_all(plan(source, mxnet, nccl, cuda), build)
        install(source, link(objects, build, mxnet, nccl, cuda, source))
    except BuildError as error:
        fail(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])

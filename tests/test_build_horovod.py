"""scripts/build_horovod.py: patches of the source, which files are compiled again, how many compilers run. Horovod is
not built."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "build_horovod.py"
needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++ here")

# The parts of Horovod's source that we patch, by file: code that newer compilers refuse, and at the end a pointer that
# is read after it was freed, and a library name that only developer drivers have.
HOROVOD = {
    "horovod/common/common.h": 'void f() { throw std::logic_error(""); }\n',
    "horovod/common/group_table.h": "std::string name;\n",
    "third_party/gloo/gloo/types.h": "uint8_t kind;\n",
    "third_party/flatbuffers/include/flatbuffers/stl_emulation.h":
        "using size_type = int;\nstruct Span {\n  void set(int n) { count_ = n; }\n  const size_type count_;\n};\n",
    "horovod/mxnet/mpi_ops.cc": "#include <string>\nstruct Parameters { char** op_names; };\n"
                                "auto name(Parameters* ops_param) { return ops_param->op_names[0]; }\n",
    "horovod/mxnet/cuda_util.cc": 'const char* driver = "libcuda.so";\n',
}
# The parts of the source that we patch for the loss of a process, with enough code around them to compile and run.
LOSS = {
    "horovod/mxnet/mpi_ops.cc": """
#include <atomic>
#include <functional>
#include <mutex>
#include <string>
struct Status {
  std::string text;
  bool ok() const { return text.empty(); }
  std::string reason() const { return text; }
};
namespace dmlc { struct Error { Error(std::string) {} }; }
struct CallbackOnComplete {
  static int ended;
  void operator()(dmlc::Error* error = nullptr) { ended += error ? 100 : 1; }
};
int CallbackOnComplete::ended = 0;
namespace common { Status initialized; Status CheckInitialized() { return initialized; } }
Status enqueued;
inline void InvokeCompleteCallback(CallbackOnComplete on_complete, const Status& status) {
  if (status.ok()) {
    on_complete();
  } else {
    auto error = dmlc::Error(status.reason());
    on_complete(&error);
  }
}
void ThrowIfError(const Status& status) { if (!status.ok()) throw 1; }
void DoHorovodOperation(void* on_complete_ptr) {
  ThrowIfError(common::CheckInitialized());

  auto on_complete = *static_cast<CallbackOnComplete*>(on_complete_ptr);
  Status enqueue_result = enqueued;
  ThrowIfError(enqueue_result);
}
""",
    "horovod/common/operations.cc": """
    global_gloo_context.Initialize(ParseGlooIface());
  }
  if (state.control_operation == LibType::GLOO) {
    // Initializes global controller
    state.process_set_table.Initialize(global_gloo_context);
  }
    horovod_global.initialization_done = false;
    horovod_global.background_thread = std::thread();
  } catch (const std::exception& ex) {
    status = Status::UnknownError(ex.what());
  }
""",
    "horovod/common/tensor_queue.h": """
protected:
  mutable std::mutex mutex_;
""",
    "horovod/common/tensor_queue.cc": """
Status TensorQueue::AddToTensorQueue(TensorTableEntry& e, Request& message) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (tensor_table_.find(e.tensor_name) != tensor_table_.end()) {
Status TensorQueue::AddToTensorQueueMulti(std::vector<TensorTableEntry>& entries) {
  std::lock_guard<std::mutex> guard(mutex_);

  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (tensor_table_.find(entries[i].tensor_name) != tensor_table_.end()) {
void TensorQueue::FinalizeTensorQueue(const Status& status) {
  std::lock_guard<std::mutex> guard(mutex_);
  for (auto& e : tensor_table_) {
    e.second.FinishWithCallback(status);
""",
    "horovod/common/process_set.cc": """
  LOG(TRACE) << "Initializing new process set with Gloo: "
""",
    "third_party/gloo/gloo/transport/tcp/pair.cc": """
    handleReadWrite(events);
    return;
  // Loop through posted send operations.
""",
}
# Three operations: one completes, one is refused by Horovod, and one comes when Horovod is not running.
CALLS = """
#include <cassert>
int main() {
  CallbackOnComplete done;
  assert(!horovod_mxnet_failure());
  InvokeCompleteCallback(done, Status{});
  assert(!horovod_mxnet_failure());
  enqueued.text = "told to MXNet, as nobody has asked for it";
  DoHorovodOperation(&done);
  assert(!horovod_mxnet_failure() && done.ended == 101);
  done.ended = 1;
  horovod_mxnet_keep_failures();
  enqueued.text = "first";
  DoHorovodOperation(&done);
  assert(horovod_mxnet_failure() == std::string("first"));
  common::initialized.text = "second";
  DoHorovodOperation(&done);
  assert(horovod_mxnet_failure() == std::string("first") && done.ended == 3);
  horovod_mxnet_forget_failure();
  assert(!horovod_mxnet_failure());
}
"""


@pytest.fixture(scope="module")
def build() -> Any:
    spec = importlib.util.spec_from_file_location("build_horovod", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for name in HOROVOD | LOSS:
        path = tmp_path / "horovod-0.28.1" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(LOSS.get(name, "") + HOROVOD.get(name, ""))
    return tmp_path / "horovod-0.28.1"


@pytest.mark.long
@needs_compiler
def test_the_source_is_mended_for_compilers_of_today(build, source):
    build.mend(source)
    for name in HOROVOD:
        subprocess.run(["g++", "-fsyntax-only", "-x", "c++", source / name], check=True)
    assert "return std::string(ops_param->op_names[0])" in (source / "horovod/mxnet/mpi_ops.cc").read_text()
    assert '"libcuda.so.1"' in (source / "horovod/mxnet/cuda_util.cc").read_text()


@pytest.mark.long
@needs_compiler
def test_an_operation_that_fails_is_no_error_to_mxnet(build, source):
    """The reason of the first failure is returned on request."""
    build.mend(source)
    program = source / "horovod/mxnet/mpi_ops.cc"
    program.write_text(program.read_text() + CALLS)
    subprocess.run(["g++", program, "-o", source / "program"], check=True)
    subprocess.run([source / "program"], check=True)


def test_what_a_loss_needs_is_mended(build, source):
    """A failed operation on the CPU ends Horovod. A tensor queue that has ended accepts no more tensors. Gloo's thread
    throws no exception, and notifies all waiting threads."""
    build.mend(source)
    read = {name: (source / name).read_text() for name in LOSS}
    operations = read["horovod/common/operations.cc"]
    assert operations.index("e.FinishWithCallback(status)") < operations.index("device == CPU_DEVICE_ID) throw;")
    assert operations.count("initialization_failed = true;") == operations.count("initialization_failed = false;") == 1
    assert read["horovod/common/tensor_queue.cc"].count("if (!ended_.ok()) return ended_;") == 2
    assert read["horovod/common/tensor_queue.cc"].count("ended_ = status;") == 1
    assert "tensor_queue.Begin();" in read["horovod/common/process_set.cc"]
    pair = read["third_party/gloo/gloo/transport/tcp/pair.cc"]
    assert "if (ex_ == nullptr) signalException(std::current_exception());" in pair and "tell(rx_);" in pair


def test_another_source_is_refused(build, source):
    (source / "horovod/mxnet/cuda_util.cc").write_text("")
    with pytest.raises(build.BuildError, match=r"cuda_util\.cc has no '\"libcuda\.so\"', so it is not the source"):
        build.mend(source)


def test_the_source_is_unpacked_anew_when_something_else_is_to_be_mended(build, source, tmp_path, monkeypatch):
    """The source is unpacked again only if the patches have changed."""
    folder, downloads = tmp_path / "horovod", []

    def download(*arguments):
        downloads.append(arguments)
        with tarfile.open(folder / "horovod-0.28.1.tar.gz", "w:gz") as archive:
            archive.add(source, "horovod-0.28.1")

    folder.mkdir()
    monkeypatch.setattr(build, "pip", download)
    first = build.fetch_source(folder)
    assert build.fetch_source(folder) == first and len(downloads) == 1
    monkeypatch.setattr(build, "REPLACED", (*build.REPLACED, ("horovod/mxnet/cuda_util.cc", "driver", "name")))
    second = build.fetch_source(folder)
    assert (second / "horovod/mxnet/cuda_util.cc").read_text() == 'const char* name = "libcuda.so.1";\n'
    assert [path.name for path in folder.iterdir() if path.is_dir() and path.name != "unpacked"] == [second.name]


def test_gpu_parts_only_for_gpus(build, source, tmp_path):
    for_cpu = build.plan(source, tmp_path, None, None)
    for_gpu = build.plan(source, tmp_path, tmp_path / "nccl", tmp_path / "cuda")
    assert {unit.name for unit in for_gpu} - {unit.name for unit in for_cpu} == {"gpu", "kernels"}
    assert "-DHOROVOD_GPU_ALLREDUCE=78" in for_gpu[0].flags and "-DHAVE_CUDA=1" not in for_cpu[0].flags
    assert for_cpu[-1].name == for_gpu[-1].name == "allreduce"  # as `link` expects


@needs_compiler
def test_only_what_changed_is_compiled_again(build, tmp_path, capsys):
    one, other = build.Unit("one", "int one;\n", ()), build.Unit("other", "int other;\n", ())
    objects = build.compile_all([one, other], tmp_path)
    assert [path.name for path in objects] == ["one.o", "other.o"]
    assert "compiled 2 of 2 parts of Horovod" in capsys.readouterr().out
    times = [path.stat().st_mtime_ns for path in objects]
    build.compile_all([one, other._replace(text="int changed;\n")], tmp_path)
    assert objects[0].stat().st_mtime_ns == times[0] and objects[1].stat().st_mtime_ns != times[1]
    build.compile_all([one._replace(flags=("-O1",))], tmp_path)
    assert objects[0].stat().st_mtime_ns != times[0]


@needs_compiler
def test_messages_do_not_name_the_folder_of_the_build(build, source, tmp_path):
    (source / "named.cc").write_text("const char *named = __FILE__;\n")
    flags = [flag for flag in build.plan(source, tmp_path, None, None)[0].flags if flag.startswith("-fmacro")]
    unit = build.Unit("named", f'#include "{source}/named.cc"\n', tuple(flags))
    made = build.compile_unit(unit, tmp_path).read_bytes()
    assert b"named.cc" in made and f"{source}/named.cc".encode() not in made


@needs_compiler
def test_an_error_of_the_compiler(build, tmp_path):
    """An error of the compiler is reported in one sentence. The object file then does not exist, so the next call
    compiles it again.
    """
    with pytest.raises(build.BuildError, match=r"wrong\.cc:1:\d+: error: .*missing"):
        build.compile_unit(build.Unit("wrong", "int a = missing;\n", ()), tmp_path)
    assert not (tmp_path / "wrong.o").exists()


def test_a_compiler_that_is_killed(build, tmp_path, monkeypatch):
    with pytest.raises(build.BuildError, match="was killed, perhaps because memory ran out"):
        build.run(["bash", "-c", "kill -9 $$"])
    with pytest.raises(build.BuildError, match="was killed, perhaps because memory ran out"):
        build.run(["bash", "-c", "echo g++: fatal error: Killed signal terminated program cc1plus; exit 1"])


@pytest.mark.parametrize(("memory", "jobs"), [(0.3e9, 1), (1.7e9, 2), (64e9, 4)])
def test_as_many_compilers_as_memory_holds(build, monkeypatch, memory, jobs):
    monkeypatch.setattr(build, "available_memory", lambda: memory)
    monkeypatch.setattr(build.os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    assert build.num_jobs() == jobs


def test_available_memory(build, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "CONTROL_GROUP", tmp_path)
    free = build.available_memory()
    assert 1e6 < free < 1e14
    (tmp_path / "memory.max").write_text("max\n")
    assert build.available_memory() > 1e6
    (tmp_path / "memory.max").write_text("12345\n")
    assert build.available_memory() == 12345


def test_no_compiler(tmp_path):
    command = [sys.executable, SCRIPT, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, env={"CXX": "no-such-g++"})
    assert done.returncode == 2
    assert done.stderr == ("error: there is no no-such-g++, which compiles it: install g++ (Debian, Ubuntu: apt "
                           "install g++; Fedora: dnf install gcc-c++)\n")


@pytest.mark.parametrize(("argument", "code"), [("--help", 0), ("-h", 0), ("--version", 2)])
def test_an_option_is_no_folder(argument: str, code: int, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), argument], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == code and "build_horovod.py FOLDER" in done.stdout + done.stderr
    assert not list(tmp_path.iterdir())

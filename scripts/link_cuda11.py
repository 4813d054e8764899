#!/usr/bin/env python3
"""Give an installed mxnet-cu117 the CUDA 11 libraries that it links. scripts/setup.sh runs it in the new environment.

libmxnet.so searches its own folder first (RPATH $ORIGIN), so each library gets a link there:

- if a wheel has installed the real library (always CUDA's runtime, NVTX and NCCL; the others with the extra `cuda11`),
  a link to it;
- otherwise a link to a stub, compiled here: functions that create handles return 'success', all others fail. The real
  libraries are 2.6 GB, and the cuda executor calls none of them. With stubs, stock MXNet operators fail on the GPU. On
  a GPU of compute capability 9.0 or later they fail with the real libraries too, because mxnet-cu117 has no kernels for
  these GPUs.

Compiling stubs needs gcc and binutils' nm. The script can be repeated: each run makes all links and stubs anew.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

CREATE = "(void **handle) { *handle = (void *)0x1000; return 0; }"
SUCCEED = "(void) { return 0; }"
FAIL = "(void) { return 999; }"

# Libraries that must be real, because MXNet calls them at import or when it moves data.
REAL = ("libcudart.so.11.0", "libnvToolsExt.so.1", "libnccl.so.2")

# Function prefix -> (library, its functions that MXNet calls to create a stream's handles).
STUBS = {
    "cublas": (
        "libcublas.so.11",
        {
            "cublasCreate_v2": CREATE,
            "cublasDestroy_v2": SUCCEED,
            "cublasSetStream_v2": SUCCEED,
            "cublasSetMathMode": SUCCEED,
            "cublasGetMathMode": SUCCEED,
            "cublasSetPointerMode_v2": SUCCEED,
        },
    ),
    "cusolver": (
        "libcusolver.so.11",
        {"cusolverDnCreate": CREATE, "cusolverDnDestroy": SUCCEED, "cusolverDnSetStream": SUCCEED},
    ),
    "cudnn": (
        "libcudnn.so.8",
        {
            "cudnnCreate": CREATE,
            "cudnnDestroy": SUCCEED,
            "cudnnSetStream": SUCCEED,
            "cudnnGetVersion": "(void) { return 8500; }",
        },
    ),
    "cufft": ("libcufft.so.10", {}),
    "curand": ("libcurand.so.10", {}),
    "cusparse": ("libcusparse.so.11", {}),
    "nvrtc": ("libnvrtc.so.11.2", {}),
}


def imported_functions(library: Path) -> list[str]:
    """Names of the versioned functions that a shared library imports."""
    symbols = subprocess.run(["nm", "-D", str(library)], check=True, capture_output=True, text=True).stdout
    return re.findall(r" U (\w+)@", symbols)


def build_stub(prefix: str, soname: str, bodies: dict[str, str], functions: list[str], folder: Path) -> None:
    """Compile `folder/soname`, a stub with all functions of `functions` that start with `prefix`."""
    wanted = [name for name in functions if re.match(prefix + "[A-Z]", name)]
    source = "".join(f"long {name}{bodies.get(name, FAIL)}\n" for name in wanted) or "int unused;\n"
    version_script = folder / f"{soname}.map"
    version_script.write_text(f"{soname} {{ global: *; }};\n")  # MXNet asks for symbols versioned with the soname
    command = ["gcc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(folder / soname)]
    command += [f"-Wl,-soname,{soname}", f"-Wl,--version-script={version_script}"]
    subprocess.run(command, input=source, text=True, check=True)
    version_script.unlink()


def main() -> None:
    site = Path(sysconfig.get_path("purelib"))
    mxnet = site / "mxnet"
    real = {path.name: path for path in site.glob("nvidia/*/lib/*.so*")}
    missing = [name for name in REAL if name not in real]
    if not (mxnet / "libmxnet.so").exists() or missing:
        sys.exit(f"error: {site} lacks {', '.join(missing) or 'MXNet'}; run make setup where there is an NVIDIA GPU")

    def replace(name: str) -> Path:
        (mxnet / name).unlink(missing_ok=True)
        return mxnet / name

    for name in REAL:
        replace(name).symlink_to(real[name])
    functions: list[str] | None = None
    for prefix, (soname, bodies) in STUBS.items():
        link = replace(soname)
        if soname in real:
            link.symlink_to(real[soname])
            continue
        if not shutil.which("gcc") or not shutil.which("nm"):
            sys.exit(f"error: no gcc to build a stub of {soname}; install gcc, or the real one: pip install .[cuda11]")
        functions = functions or imported_functions(mxnet / "libmxnet.so")
        build_stub(prefix, soname, bodies, functions, mxnet)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Goes through the set-up of a GPU machine on one without a GPU; run by hand: tests/try_gpu_setup.py FOLDER

It installs all packages into FOLDER (5 GB), for the Python that scripts/setup.sh finds on PATH, compiles Horovod with
NCCL and train/processes/allreduce.cc, and loads the result: `nvidia-smi` and the driver's library libcuda.so.1 are
stand-ins that it makes. At the end two processes add numbers on the CPU. It cannot show anything that runs on a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE, which each function of the stand-in returns
# The driver's functions that libmxnet.so and we call.
DRIVER = ("CtxGetDevice", "DeviceGet", "DeviceGetAttribute", "DeviceGetCount", "DeviceGetName", "DriverGetVersion",
          "DevicePrimaryCtxRetain", "GetErrorString", "GraphKernelNodeGetParams", "GraphNodeGetType", "Init",
          "LaunchKernel", "ModuleGetFunction", "ModuleLoadData", "ModuleLoadDataEx", "ModuleUnload")
LOAD = """
import platform, common.mxnet_compat, cudnn, horovod.mxnet as hvd, numpy, nvidia.dali
from common.mxnet_compat import mx
from cuda.pathfinder import load_nvidia_dynamic_lib
from train.processes.allreduce import load_library
assert mx.runtime.Features().is_enabled("CUDA") and hvd.nccl_built() and hvd.gloo_built()
load_library(on_gpu=True)
load_nvidia_dynamic_lib("nvrtc")
print(f"Python {platform.python_version()}, NumPy {numpy.__version__}, MXNet {mx.__version__}, "
      f"DALI {nvidia.dali.__version__}, Horovod with NCCL {hvd.nccl_built()} and Gloo: loaded")
"""
AVERAGE = """
from train.processes.distributed import Workers
workers = Workers()
assert workers.sum([1.0 + workers.rank]) == [3.0]
print(f"process {workers.rank} of {workers.size}: the sum is right")
"""
LAUNCH = """
import sys
from train.processes.launch import launch, plan
sys.exit(launch(plan(2, on_cpu=True)[0], [sys.executable, "-c", sys.argv[1]]))
"""


def make_stand_ins(folder: Path) -> None:
    """Write the stand-ins `nvidia-smi` and `libcuda.so.1` to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "580.65.06, 9.0, NVIDIA H200"\n')
    program.chmod(0o755)
    functions = "".join(f"int cu{name}(void) {{ return {NO_DEVICE}; }}\n" for name in DRIVER)
    library = ["-o", str(folder / "libcuda.so.1"), "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "-", *library], input=functions, text=True, check=True)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: tests/try_gpu_setup.py FOLDER")
    folder = Path(sys.argv[1]).resolve()
    make_stand_ins(folder / "stand-ins")
    python = folder / "venv" / "bin" / "python"
    environment = {**os.environ, "PATH": f"{folder}/stand-ins:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
                   "LD_LIBRARY_PATH": f"{folder}/stand-ins", "PYTHON": str(python)}
    for command in (["bash", "scripts/setup.sh", "all", folder / "venv"], [python, "-c", LOAD],
                    [python, "-c", LAUNCH, AVERAGE]):
        subprocess.run(command, check=True, env=environment, cwd=ROOT)


if __name__ == "__main__":
    main()

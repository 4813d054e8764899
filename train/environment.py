"""Where a run takes place: the machine, the versions, the command and the commit, as reports and results name them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import platform
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from common.nvidia_gpus import find_gpus

LAUNCHER_VARIABLE = "RESNET_LAUNCHER"  # environment variable: what started this process, with its own options


def launcher() -> str:
    """What starts runs like this one; the options of `python -m train` follow it."""
    return os.environ.get(LAUNCHER_VARIABLE, "python -m train")


def command_line() -> str:
    """The command that started this process, or the launcher that did, ready to be copied into a shell."""
    if LAUNCHER_VARIABLE in os.environ:
        return f"{launcher()} {shlex.join(sys.orig_argv[3:])}"  # it was: python -m train ...
    return shlex.join(["python", *sys.orig_argv[1:]])


@functools.cache
def git_commit() -> str | None:
    """Commit of this project's checkout, with '-dirty' where tracked files differ from it; or of the source archive
    that was unpacked here, in whose `.git_archival.txt` git has written it. None where it is neither.

    Benchmark results do not count as a difference: measuring one figure must not mark the next one as dirty.
    """
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return _archived_commit(root)

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        changes = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
        return git("rev-parse", "HEAD") + ("-dirty" if changes else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _archived_commit(root: Path) -> str | None:
    with contextlib.suppress(OSError):
        if match := re.fullmatch(r"node: ([0-9a-f]{40}(-dirty)?)\n", (root / ".git_archival.txt").read_text()):
            return match[1]
    return None


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that a result depends on, by package name; without importing them.

    What pip does not know, because it was copied or comes with the system, is asked for its version itself.
    """
    found = {"python": platform.python_version(), "os": platform.platform()}
    for package in (
        "mxnet", "mxnet-cu117", "numpy", "nvidia-dali-cuda120", "horovod", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13",
        "nvidia-cudnn-frontend", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "cuda-core",
    ):  # fmt: skip
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    if not found.keys() & {"mxnet", "mxnet-cu117"} and (version := _mxnet_version()):
        found["mxnet"] = version
    if not found.keys() & {"nvidia-cudnn-cu12", "nvidia-cudnn-cu13"}:
        with contextlib.suppress(OSError):
            number = ctypes.CDLL("libcudnn.so.9").cudnnGetVersion()  # 91900 is 9.19.0
            found["cudnn"] = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    return found


def _mxnet_version() -> str | None:
    """What MXNet's own files say, without importing it."""
    with contextlib.suppress(ImportError, OSError):
        spec = importlib.util.find_spec("mxnet")
        if spec and spec.origin:
            text = (Path(spec.origin).parent / "libinfo.py").read_text()
            if match := re.search(r"^__version__ = ['\"]([\w.]+)", text, re.MULTILINE):
                return match[1]
    return None


def hardware() -> dict[str, Any]:
    """CPU model; cores and NVIDIA GPUs that this process may use; memory in GiB; the GPUs' driver, where NVML tells."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
    found: dict[str, Any] = {
        "cpu": cpu,
        "cpu_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": [gpu.name for gpu in find_gpus()],
    }
    with contextlib.suppress(Exception):  # no NVML, no driver
        import pynvml

        pynvml.nvmlInit()
        found["driver"] = pynvml.nvmlSystemGetDriverVersion()
    return found

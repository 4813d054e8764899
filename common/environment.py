"""The environment of a run: the machine, the library versions and the commit, for reports, results and `--version`."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from common.nvidia_gpus import find_gpus

PROJECT = "resnet-mxnet"
ROOT = Path(__file__).resolve().parent.parent


def show_versions() -> None:
    """Print what --version shows."""
    print(describe())


def describe() -> str:
    """The text of `--version`: this project's version and commit, and one line for each library that it uses."""
    commit, found = git_commit(), versions()
    lines = [f"{PROJECT} {project_version()}" + (f", commit {commit}" if commit else "")]
    for library in ("python", "mxnet", "nvidia-dali", "horovod"):
        names = [name for name in found if name.startswith(library)]
        lines += [f"{name} {found[name]}" for name in names] or [f"{library}: not installed"]
    return "\n".join(lines)


def project_version() -> str:
    """The version in the checkout's pyproject.toml, because a checkout runs its own code; otherwise the installed
    one."""
    with contextlib.suppress(OSError):
        if match := re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE):
            return match[1]
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(PROJECT)
    return "of unknown version"


@functools.cache
def git_commit() -> str | None:
    """The commit of this checkout, with '-dirty' if tracked files differ from that commit.

    In an unpacked source archive, the commit that git has written into `.git_archival.txt`. None if this is neither a
    checkout nor an archive.

    Changed benchmark results do not count as a difference: measuring one figure must not mark the next one as dirty.
    """
    if not (ROOT / ".git").exists():
        return _archived_commit(ROOT)

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True, timeout=10
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
    """Versions of Python and of the libraries that a result depends on, by package name, without importing them.

    If pip does not know a library (a copied file, or a system package), its version is read from the library itself.
    """
    found = {"python": platform.python_version(), "os": platform.platform()}
    for package in (
        "mxnet", "mxnet-cu117", "numpy", "nvidia-dali-cuda120", "horovod", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13",
        "nvidia-cudnn-frontend", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "cuda-core",
    ):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    if not found.keys() & {"mxnet", "mxnet-cu117"} and (version := _mxnet_version()):
        found["mxnet"] = version
    if not found.keys() & {"nvidia-cudnn-cu12", "nvidia-cudnn-cu13"}:
        with contextlib.suppress(OSError):
            number = ctypes.CDLL("libcudnn.so.9").cudnnGetVersion()  # cuDNN encodes 9.19.0 as 91900
            found["cudnn"] = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    return found


def _mxnet_version() -> str | None:
    """MXNet's version from its own files, without importing it."""
    with contextlib.suppress(ImportError, OSError):
        spec = importlib.util.find_spec("mxnet")
        if spec and spec.origin:
            text = (Path(spec.origin).parent / "libinfo.py").read_text()
            if match := re.search(r"^__version__ = ['\"]([\w.]+)", text, re.MULTILINE):
                return match[1]
    return None


def hardware() -> dict[str, Any]:
    """CPU model; cores and NVIDIA GPUs that this process may use; memory in GiB; GPU driver version, if NVML is
    there."""
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
    with contextlib.suppress(Exception):  # NVML or the driver may be missing
        import pynvml

        pynvml.nvmlInit()
        found["driver"] = pynvml.nvmlSystemGetDriverVersion()
    return found

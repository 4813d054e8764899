"""For tests that start processes: their environment, and a function that runs a script in several of them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "scripts" / "dgx1_8gpu.sh"
BATCH, COMMIT_EVERY = 4, 2  # of a `Run`
# Seconds after which a test gives up. This is not the tested value: a machine ten times as busy as usual stays within
# it.
LIMIT = 300
LIGHT = REPOSITORY / "tests" / "light"  # on PYTHONPATH it makes a run shorter
needs_horovod = pytest.mark.skipif(find_spec("horovod") is None, reason="Horovod is not installed (no g++ at set-up)")


def python_path(light: bool = False) -> str:
    """PYTHONPATH of a process with narrow networks and without a report."""
    return os.pathsep.join([*[str(LIGHT)] * light, str(REPOSITORY), os.environ.get("PYTHONPATH", "")])


def run_processes(
    script: str, *arguments: object, count: int = 2, light: bool = False, hang_seconds: int = 40, min_np: int = 0,
    on_gpus: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a Python script in several processes by the launcher `python -m train.processes.launch`. `min_np`: elastic;
    `on_gpus`: each process has its own GPU; `light`: with tests/light."""
    call = f"launch_elastic(slots, sys.argv[1:], {min_np}, 0," if min_np else "launch(slots, sys.argv[1:],"
    starter = (f"import sys; from train.processes.launch import *; slots, _ = plan({count}, on_cpu={not on_gpus}); "
               f"sys.exit({call} {hang_seconds}))")
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(light)}
    starting = [sys.executable, "-c", starter, *command]
    return subprocess.run(starting, capture_output=True, text=True, env=environment, timeout=LIMIT)


class Run:
    """A run on generated images; on the CPU an epoch of them is longer than any test.

    Its output goes to files: a pipe that nobody reads is full after some hundred steps, and the run would wait forever.
    """

    def __init__(self, folder: Path, device: str, processes: int, *options: str) -> None:
        self.folder = folder
        environment = {**os.environ, "PYTHON": sys.executable}
        if device == "cpu":
            options = (*options, "--model", "resnet18", "--image-size", "32", "--num-threads", "1")
            environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(light=True)}
        with self._words("out").open("w") as out, self._words("err").open("w") as err:
            self.process = subprocess.Popen(
                ["bash", SCRIPT, "-n", str(processes), *options, "-b", str(BATCH), "--device", device, "--epochs", "90",
                 "--config", "cpu_sample", "--data", "synthetic", "--no-tensorboard", "--warmup-epochs", "0",
                 "--log-every", "1", "--checkpoint-minutes", "0", "--validate-every", "0", "--optimizer", "sgd",
                 "--learning-rate", "0.16", "--momentum", "0.9", "--weight-decay", "1e-4",
                 "--commit-every", str(COMMIT_EVERY), "--output", folder],
                stdout=out, stderr=err, env=environment,
            )

    def _words(self, kind: str) -> Path:
        return self.folder.with_name(f"{self.folder.name}.{kind}")

    @property
    def out(self) -> str:
        return self._words("out").read_text()

    @property
    def err(self) -> str:
        return self._words("err").read_text()

    def events(self, kind: str) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        found = []
        for line in lines:
            if f'"event": "{kind}"' in line and line.endswith("}"):
                found.append(json.loads(line))
        return found

    def wait_for(self, condition: Callable[[], object], seconds: float = LIMIT) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.out + self.err
            assert time.monotonic() < end, f"{self.events('session')} {self.err}"
            time.sleep(0.05)

    def last_step(self) -> int:
        return max((event["step"] for event in self.events("steps")), default=0)

    def workers(self) -> dict[int, int]:
        """Process ids by the rank with which each started."""
        found = {}
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for pid in {*children, *_children_of_threads(self.process.pid)}:
            try:
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                continue
            rank = [entry for entry in variables if entry.startswith(b"HOROVOD_RANK=")]
            if rank:
                found[int(rank[0].partition(b"=")[2])] = int(pid)
        return found

    def end(self) -> tuple[int, str, str]:
        code = self.process.wait(LIMIT)
        return code, self.out, self.err


def _children_of_threads(pid: int) -> Iterator[str]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            yield from (task / "children").read_text().split()

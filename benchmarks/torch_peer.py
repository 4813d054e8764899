"""Starts the peers and alternates with them. PyTorch runs in its own interpreter, PEER_PYTHON."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from common.errors import ProgramError, UserError

PEER = Path(__file__).with_name("peer_pytorch.py")


def require_peer() -> None:
    """Raise UserError if PEER_PYTHON is not set."""
    if "PEER_PYTHON" not in os.environ:
        raise UserError("PEER_PYTHON is not set: let it name a Python interpreter with PyTorch and torchvision")


def start_peer(script: Path, *options: object) -> subprocess.Popen[str]:
    """Start a peer's program with these options, in an environment without our own libraries. Raises UserError."""
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "LD_LIBRARY_PATH")}
    command = [os.environ["PEER_PYTHON"], str(script), *map(str, options)]
    try:
        return subprocess.Popen(command, env=clean, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    except OSError as error:
        raise UserError(f"PEER_PYTHON={command[0]} cannot be started ({error.strerror}): let it name a Python "
                         "interpreter with PyTorch and torchvision") from None


class LinePeer:
    """A peer's program that answers each line with a line, and keeps running in between."""

    def __init__(self, script: Path, *options: object) -> None:
        self._process = start_peer(script, *options)

    def say(self, line: str) -> None:
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # it has ended; the empty answer will show that
            print(line, file=self._process.stdin, flush=True)

    def answer(self) -> str:
        """The peer's next line. Raises ProgramError if it has ended."""
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise ProgramError(f"the peer ended with exit code {self._process.wait()}: see its message above")
        return line

    def close(self) -> None:
        """Close the peer's input, and wait until it ends."""
        self._process.communicate()


class TorchPeer(LinePeer):
    """peer_pytorch.py with the given options, kept running between measurements."""

    def __init__(self, *options: str) -> None:
        super().__init__(PEER, *options)
        self.versions: dict[str, str] = {}  # of the peer's libraries; known after its first measurement

    def prepare(self, mode: str) -> None:
        """Build and compile a mode, so that its first measurement does not. Raises ProgramError if it has ended."""
        self.say(f"prepare {mode}")
        self.answer()

    def measure(self, mode: str = "eager") -> dict[str, Any]:
        """Measure once in a mode; returns the output of peer_pytorch.py. Raises ProgramError if it has ended."""
        self.say(mode)
        turn: dict[str, Any] = json.loads(self.answer())
        self.versions = turn["versions"]
        return turn


T = TypeVar("T")


def take_turns(rounds: int, programs: Mapping[str, Callable[[], T]]) -> dict[str, list[T]]:
    """Call each program once in each round; returns their results by name. So a slow spell of the machine hits all."""
    turns: dict[str, list[T]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            turns[name].append(program())
    return turns


def all_times(turns: Iterable[Mapping[str, Any]]) -> list[float]:
    """The step times of all rounds of a program, in order."""
    return [ms for turn in turns for ms in turn["step_ms"]]

"""Starts the peers, and takes turns with peer_pytorch.py. PyTorch runs in an interpreter of its own: PEER_PYTHON."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.errors import ProgramError, UserError

PEER = Path(__file__).with_name("peer_pytorch.py")


def require_peer() -> None:
    """Raise UserError where there is no interpreter for it."""
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


class TorchPeer:
    """peer_pytorch.py with these options, kept running between its turns."""

    def __init__(self, *options: str) -> None:
        self._process = start_peer(PEER, *options)

    def measure(self) -> dict[str, Any]:
        """One turn: what peer_pytorch.py prints."""
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(BrokenPipeError):  # it has ended, which the empty answer tells
            print("go", file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise ProgramError(f"the peer ended with exit code {self._process.wait()}: see its message above")
        result: dict[str, Any] = json.loads(line)
        return result

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def take_turns(rounds: int, measure: Callable[[], list[float]],
               peer: TorchPeer | None) -> tuple[list[float], list[float], dict[str, Any]]:
    """Milliseconds of ours, as `measure` gives them, and of the peer, where there is one; and all of its last turn."""
    ours: list[float] = []
    theirs: list[float] = []
    turn: dict[str, Any] = {}
    for _ in range(rounds):
        ours += measure()
        if peer:
            turn = peer.measure()
            theirs += turn["step_ms"]
    return ours, theirs, turn

"""The inputs that benchmarks/two_checkouts.py refuses before it measures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("folder, sentence", [
    ("/nowhere", "/nowhere is not a checkout of this project; make one with git worktree"),
    (str(ROOT), "steps are compared on an NVIDIA GPU, and there is none here")])
def test_mistakes(benchmark_module: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, folder: str,
                  sentence: str) -> None:
    two_checkouts = benchmark_module("two_checkouts")
    monkeypatch.setattr(two_checkouts, "find_gpus", lambda: [])
    monkeypatch.setattr("sys.argv", ["two_checkouts.py", folder])
    with pytest.raises(UserError, match=sentence):
        two_checkouts.main()

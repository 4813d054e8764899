"""Seconds of the section cost of `gpu-report`: work repeated after a kill counts once."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_report.cost import Validation, validations


def session(time: float, step: int) -> dict[str, Any]:
    return {"event": "session", "time": time, "step": step, "epoch": 1 + step // 10}


def steps(time: float, step: int) -> dict[str, Any]:
    return {"event": "steps", "time": time, "step": step}


def checkpoint(time: float, step: int) -> list[dict[str, Any]]:
    """A checkpoint event, which took a second."""
    return [{"event": "phase", "name": "checkpoint", "time": time, "seconds": 1.0},
            {"event": "checkpoint", "time": time, "step": step}]


def epoch(time: float, number: int) -> dict[str, Any]:
    return {"event": "epoch", "time": time, "epoch": number, "val_top1": number / 10}


BEGINNING = [session(0.1, 0), steps(8.0, 10), epoch(10.0, 1), *checkpoint(11.0, 10)]  # 10 s count


@pytest.mark.parametrize("lines, seconds", [
    ([*BEGINNING, steps(19.0, 20), epoch(21.0, 2)], [10, 20]),
    # Killed in mid-epoch, 5 s after the checkpoint; the next session begins half a second after its start.
    ([*BEGINNING, steps(16.0, 15), session(16.5, 10), steps(24.5, 20), epoch(26.5, 2)], [10, 20]),
    # Two kills, with a checkpoint in mid-epoch in between.
    ([*BEGINNING, steps(16.0, 15), session(16.5, 10), steps(20.5, 15), *checkpoint(21.5, 15), steps(23.5, 17),
      session(24.0, 15), steps(28.0, 20), epoch(30.0, 2)], [10, 20]),
    # Killed before the first checkpoint: neither its time nor the time of the lost epoch counts.
    ([session(0.1, 0), steps(8.0, 10), epoch(10.0, 1), session(12.0, 0), steps(20.0, 10), epoch(22.0, 1)], [10]),
    # Killed in validation, right after a checkpoint. Killed again while the checkpoint of the epoch's end was being
    # written.
    ([session(0.1, 0), steps(8.0, 10), *checkpoint(9.0, 10), session(10.0, 10), epoch(12.0, 1), session(13.0, 10),
      epoch(15.0, 1), *checkpoint(16.0, 10), steps(24.0, 20), epoch(26.0, 2)], [10, 20]),
    # The checkpoint is complete five steps after its capture; then the run is killed.
    ([*BEGINNING[:-1], steps(15.5, 15), {"event": "checkpoint", "time": 15.7, "step": 10}, session(16.5, 10),
      steps(24.5, 20), epoch(26.5, 2)], [10, 20]),
    # Killed after the checkpoint was written, but before its event.
    ([session(0.1, 0), steps(4.0, 5), session(6.0, 5), steps(10.0, 10), epoch(12.0, 1)], [10]),
])
def test_what_is_done_again_counts_once(lines, seconds):
    assert validations(lines) == [Validation(number, pytest.approx(each), number / 10)
                                  for number, each in enumerate(seconds, start=1)]

"""The planner: the fastest way wins, is remembered by the next process, and what is not chosen leaves no trace."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.disk_cache import Cache
from graph_passes import GraphError
from graph_passes.errors import TransientError
from graph_passes.executors.cuda.arena import Arena
from graph_passes.executors.cuda.planner import Decision, Planner
from graph_passes.executors.cuda.profile import format_decisions
from graph_passes.executors.cuda.program import Buffer, Launch, Program


class FakeGpu:
    """Every launch takes as long as it says; memory is counted."""

    def __init__(self) -> None:
        self.clock, self.timed, self.allocated = 0.0, 0, 0
        self.is_full = False  # the next time that something is timed

    def allocate(self, num_bytes: int) -> int:
        self.allocated += 1
        return 1 << 20

    def free(self, address: int) -> None:
        self.allocated -= 1

    def check_free(self, num_bytes: int) -> None: ...
    def synchronize(self) -> None: ...

    def fill_random(self, address: int, num_bytes: int, dtype: str) -> None:
        assert address % 256 == 0

    def time_ms(self, enqueue: Any) -> float:
        if self.is_full:
            self.is_full = False
            raise TransientError("the GPU has no memory left")
        self.timed += 1
        start = self.clock
        enqueue()
        return self.clock - start


def planner(gpu: FakeGpu, folder: Path, deterministic: bool = False) -> Planner:
    fake: Any = gpu
    return Planner(fake, Cache("machine", folder), Arena(fake), "variant", deterministic)


def way(gpu: FakeGpu, name: str, *milliseconds: float, refused: bool = False) -> Any:
    x = Buffer("x", (7, 8), "float16", address=4711, persistent=True)
    y = Buffer("y", (7, 8), "float16")

    scratch = Buffer("scratch", (3,), "float32")

    def emit() -> Program:
        if refused:
            raise GraphError(f"no {name}")

        def enqueue(ms: float) -> None:
            places = {(1 << 20) + 256 * number for number in range(3)}
            assert {x.address, y.address, scratch.address} == places, "in the arena, not the network's"
            gpu.clock += ms

        launches = [Launch(name, f"part{index}", lambda ms=ms: enqueue(ms), (x,), (y,))  # type: ignore[misc]
                    for index, ms in enumerate(milliseconds)]
        return Program(launches, (scratch,))

    return SimpleNamespace(emit=emit, x=x, y=y)


def test_the_fastest_way_wins_and_is_remembered(tmp_path: Path) -> None:
    gpu = FakeGpu()
    first = planner(gpu, tmp_path)
    ways = {"one": way(gpu, "one", 2.0), "three": way(gpu, "three", 0.5, 0.5, 0.5),
            "never": way(gpu, "never", refused=True)}
    emits = {name: each.emit for name, each in ways.items()}
    decision = first.fastest("node", "a problem", emits)
    assert decision.chosen == "three"
    assert decision.times == {"one": 2.0, "three": 1.5, "never": float("inf")}
    assert (ways["three"].x.address, ways["three"].y.address) == (4711, 0), "as they were before"
    first.save()
    assert gpu.allocated == 1 and gpu.timed == 2, "all is timed in one arena"

    again = planner(gpu, tmp_path).fastest("other node", "a problem", dict.fromkeys(emits, pytest.fail))
    assert gpu.timed == 2, "not timed again, nor even lowered"
    assert again.node == "other node" and again.times == decision.times
    fewer = {name: emits[name] for name in ("one", "never")}
    assert planner(gpu, tmp_path).fastest("node", "a problem", fewer).chosen == "one"
    assert gpu.timed == 2, "there is no other way, so there is nothing to time"
    other = planner(gpu, tmp_path)
    assert other.fastest("node", "a problem", {name: emits[name] for name in ("one", "three")}).chosen == "three"
    other.save()
    assert gpu.timed == 4, "other ways, so they are timed"
    for asked in (("one", "three"), ("one", "three", "never")):
        planner(gpu, tmp_path).fastest("node", "a problem", dict.fromkeys(asked, pytest.fail))


def test_time_decides_nothing_where_runs_are_to_be_repeatable(tmp_path: Path) -> None:
    gpu = FakeGpu()
    ways = (("never", 0.0), ("slow", 2.0), ("fast", 1.0))
    emits = {name: way(gpu, name, milliseconds, refused=name == "never").emit for name, milliseconds in ways}
    quickest = planner(gpu, tmp_path)
    assert quickest.fastest("node", "problem", emits).chosen == "fast"
    quickest.save()
    timed = gpu.timed
    assert planner(gpu, tmp_path, deterministic=True).first(emits) == "slow", "the first possible, not the fastest"
    assert gpu.timed == timed


def test_no_way_at_all_is_an_error(tmp_path: Path) -> None:
    gpu = FakeGpu()
    never = {"one": way(gpu, "such", refused=True).emit}
    for ask in (lambda: planner(gpu, tmp_path).fastest("node", "problem", never),
                lambda: planner(gpu, tmp_path).first(never)):
        with pytest.raises(GraphError, match="no such"):
            ask()


def test_what_could_not_be_timed_now_is_not_remembered(tmp_path: Path) -> None:
    """Neither of a GPU without memory, nor of a convolution that was not found in time, is the next process told."""
    def unfinished() -> Program:
        raise TransientError("not found in time")

    gpu = FakeGpu()
    emits = {name: way(gpu, name, milliseconds).emit for name, milliseconds in (("fused", 1.0), ("separate", 2.0))}
    for ways, full in ((emits, True), ({**emits, "fused": unfinished}, False)):
        now = planner(gpu, tmp_path)
        gpu.is_full = full
        decision = now.fastest("node", "problem", ways)
        assert decision.chosen == "separate" and decision.times["fused"] == float("inf")
        timed = gpu.timed
        assert now.fastest("other", "problem", ways).times == decision.times
        assert gpu.timed == timed, "one answer a process"
        now.save()
    with pytest.raises(TransientError):
        planner(gpu, tmp_path, deterministic=True).first({"fused": unfinished, "separate": emits["separate"]})
    assert planner(gpu, tmp_path).fastest("node", "problem", emits).chosen == "fused"


def test_a_cache_of_an_older_planner_is_left_alone(tmp_path: Path) -> None:
    """Its problems have other names, so they are neither read wrongly nor lost."""
    gpu = FakeGpu()
    old = planner(gpu, tmp_path)
    old._times = {"dgrad 1024x64 -> 256, BatchNormAddReluBackward, float16": {"separate": 2.0, "dgrad_reduce": 1.0}}
    old.save()
    now = planner(gpu, tmp_path)
    assert now.fastest("node", "problem", {name: way(gpu, name, 1.0).emit for name in ("a", "b")}).chosen == "a"
    now.save()
    assert planner(gpu, tmp_path)._times.keys() == {*old._times, "problem: a or b"}


def test_decisions_as_text() -> None:
    times = {"separate": 0.5, "fused": 0.25}
    decisions = [Decision("a", "one", times), Decision("b", "two", {"separate": 1.0, "fused": 2.0}),
                 Decision("c", "one", times)]
    assert format_decisions(decisions).splitlines() == [
        "a and 1 more: one",
        f"  * {'fused':<44}   0.2500 ms",
        f"    {'separate':<44}   0.5000 ms",
        "b: two",
        f"  * {'separate':<44}   1.0000 ms",
        f"    {'fused':<44}   2.0000 ms",
    ]

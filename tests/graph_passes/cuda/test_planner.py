"""The planner: the fastest way wins, is remembered by the next process, and what is not chosen leaves no trace."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.disk_cache import Cache
from graph_passes import GraphError
from graph_passes.executors.cuda.arena import Arena
from graph_passes.executors.cuda.planner import Decision, Planner
from graph_passes.executors.cuda.profile import format_decisions
from graph_passes.executors.cuda.program import Buffer, Launch


class FakeGpu:
    """Every launch takes as long as it says; memory is counted."""

    def __init__(self) -> None:
        self.clock, self.timed, self.allocated = 0.0, 0, 0

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

    def emit() -> list[Launch]:
        if refused:
            raise GraphError(f"no {name}")

        def enqueue(ms: float) -> None:
            assert {x.address, y.address} == {1 << 20, (1 << 20) + 256} or gpu.timed == 0, "scratch, not the network's"
            gpu.clock += ms

        return [Launch(name, f"part{index}", lambda ms=ms: enqueue(ms), (x,), (y,))  # type: ignore[misc]
                for index, ms in enumerate(milliseconds)]

    return SimpleNamespace(emit=emit, x=x, y=y)


def test_the_fastest_way_wins_and_is_remembered(tmp_path: Path) -> None:
    gpu = FakeGpu()
    first = planner(gpu, tmp_path)
    ways = {"one": way(gpu, "one", 2.0), "three": way(gpu, "three", 0.5, 0.5, 0.5),
            "never": way(gpu, "never", refused=True)}
    emits = {name: each.emit for name, each in ways.items()}
    decision, launches = first.fastest("node", "a problem", emits, scratch=())
    assert decision.chosen == "three" and [launch.operation for launch in launches] == ["part0", "part1", "part2"]
    assert decision.times == {"one": 2.0, "three": 1.5, "never": float("inf")}
    assert (ways["three"].x.address, ways["three"].y.address) == (4711, 0), "as they were before"
    first.save()
    assert gpu.allocated == 1 and gpu.timed == 2, "all is timed in one arena"

    again, launches = planner(gpu, tmp_path).fastest("other node", "a problem", emits, scratch=())
    assert gpu.timed == 2, "not timed again"
    assert again.node == "other node" and again.times == decision.times and len(launches) == 3
    fewer = {name: emits[name] for name in ("one",)}
    assert planner(gpu, tmp_path).fastest("node", "a problem", fewer, scratch=())[0].chosen == "one"
    assert gpu.timed == 3, "other ways, so they are timed"


def test_time_decides_nothing_where_runs_are_to_be_repeatable(tmp_path: Path) -> None:
    gpu = FakeGpu()
    emits = {name: way(gpu, name, milliseconds).emit for name, milliseconds in (("slow", 2.0), ("fast", 1.0))}
    quickest = planner(gpu, tmp_path)
    assert quickest.fastest("node", "problem", emits, scratch=())[0].chosen == "fast"
    quickest.save()
    timed = gpu.timed
    decision, launches = planner(gpu, tmp_path, deterministic=True).fastest("node", "problem", emits, scratch=())
    assert decision.chosen == launches[0].node == "slow", "the first, not the fastest"
    assert gpu.timed == timed


def test_no_way_at_all_is_an_error(tmp_path: Path) -> None:
    gpu = FakeGpu()
    with pytest.raises(GraphError, match="no such"):
        planner(gpu, tmp_path).fastest("node", "problem", {"one": way(gpu, "such", refused=True).emit}, scratch=())


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

"""The planner: each problem is timed once, the next process knows the time, and timing leaves no trace."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.disk_cache import Cache
from graph_passes import GraphError
from graph_passes.choice import Choice, format_choices
from graph_passes.errors import TransientError
from graph_passes.executors.cuda.arena import Arena
from graph_passes.executors.cuda.planner import Planner
from graph_passes.executors.cuda.program import Buffer, Launch, Program


class FakeGpu:
    """Every launch takes the time that it states; memory is counted."""

    def __init__(self) -> None:
        self.clock, self.timed, self.allocated = 0.0, 0, 0
        self.is_full = False  # whether the next timing fails as if the GPU's memory were full

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


def test_times_are_taken_once_and_remembered(tmp_path: Path) -> None:
    gpu = FakeGpu()
    first = planner(gpu, tmp_path)
    ways = {"one": way(gpu, "one", 2.0), "three": way(gpu, "three", 0.5, 0.5, 0.5),
            "never": way(gpu, "never", refused=True)}
    lowered = {name: each.emit for name, each in ways.items()}
    times = first.times(lowered)
    assert times == {"one": 2.0, "three": 1.5, "never": float("inf")}
    assert (ways["three"].x.address, ways["three"].y.address) == (4711, 0), "as they were before"
    first.save()
    assert gpu.allocated == 1 and gpu.timed == 2, "all is timed in one arena"

    others = [pytest.fail]
    again = planner(gpu, tmp_path)
    assert again.times(dict.fromkeys(lowered, pytest.fail), others) == times
    assert gpu.timed == 2, "not timed again, nor even lowered"
    more = {**dict.fromkeys(lowered, pytest.fail), "four": way(gpu, "four", 4.0).emit}
    assert again.times(more)["four"] == 4.0 and gpu.timed == 3, "what is new alone"
    again.save()
    assert planner(gpu, tmp_path).times(dict.fromkeys(more, pytest.fail)) == {**times, "four": 4.0}


def test_all_is_lowered_before_the_first_is_timed(tmp_path: Path) -> None:
    """All launches are lowered first, so that their kernels compile in parallel; also launches that need no time, even
    if they fail."""
    gpu, order = FakeGpu(), []

    def emits(name: str, refused: bool = False) -> Any:
        program = way(gpu, name, 1.0, refused=refused).emit

        def emit() -> Program:
            order.append((name, gpu.timed))
            made: Program = program()
            made.loads.append(lambda: order.append((f"load {name}", gpu.timed)))
            return made

        return emit

    planner(gpu, tmp_path).times({"a": emits("a"), "b": emits("b")}, [emits("c"), emits("d", refused=True)])
    assert order == [("a", 0), ("b", 0), ("c", 0), ("d", 0), ("load a", 0), ("load b", 1)]


def test_what_could_not_be_timed_now_is_not_remembered(tmp_path: Path) -> None:
    """Neither memory that was short, nor a convolution that was not found in time, is stored for the next process."""
    def unfinished() -> Program:
        raise TransientError("not found in time")

    gpu = FakeGpu()
    lowered = {name: way(gpu, name, milliseconds).emit for name, milliseconds in (("fused", 1.0), ("separate", 2.0))}
    for problems, full in ((lowered, True), ({**lowered, "fused": unfinished}, False)):
        now = planner(gpu, tmp_path)
        gpu.is_full = full
        assert now.times(problems) == {"fused": float("inf"), "separate": 2.0}
        timed = gpu.timed
        assert now.times(problems)["fused"] == float("inf") and gpu.timed == timed, "one answer a process"
        now.save()
    assert planner(gpu, tmp_path).times(lowered) == {"fused": 1.0, "separate": 2.0}


def test_a_cache_of_an_older_planner_is_left_alone(tmp_path: Path) -> None:
    """An older planner timed several launches together; its file has another name."""
    gpu = FakeGpu()
    old = Cache("machine", tmp_path)
    old.write("ways-0123456789abcdef-variant", b'{"a problem: separate or fused": {"separate": 2.0, "fused": 1.0}}')
    now = planner(gpu, tmp_path)
    assert now.times({"problem": way(gpu, "a", 1.0).emit}) == {"problem": 1.0}
    now.save()
    assert old.read("ways-0123456789abcdef-variant") is not None


def test_choices_as_text() -> None:
    rivals = (("Separate", 0.5),)
    choices = [Choice("a", "Fused", 0.25, rivals), Choice("b", "Alone", 1.0, (("Together", 2.0),)),
               Choice("c", "Fused", 0.25, rivals)]
    assert format_choices(choices).splitlines() == [
        f"{'Fused':<44}   0.2500 ms  a and 1 more",
        f"  or {'Separate':<39}   0.5000 ms",
        f"{'Alone':<44}   1.0000 ms  b",
        f"  or {'Together':<39}   2.0000 ms",
    ]

"""Which of several ways to compute the same is the fastest here: whole sequences of launches, timed once per problem.

The times are kept on disk beside the choice of cuDNN plans, so the next start only builds what won.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from common.disk_cache import Cache
from graph_passes.errors import GraphError, TransientError
from graph_passes.executors.cuda.arena import Arena
from graph_passes.executors.cuda.device import Gpu
from graph_passes.executors.cuda.kernels import sources_digest
from graph_passes.executors.cuda.program import Buffer, Program, run
from graph_passes.passes.memory import aligned

Way = Callable[[], Program]  # emits its launches when it is called; raises GraphError where this GPU cannot run them
log = logging.getLogger("graph_passes.cuda")


@dataclass(frozen=True)
class Decision:
    """What was chosen for one node of the graph. `times`: milliseconds of each way, infinite for one that this GPU
    cannot take."""

    node: str
    problem: str
    times: dict[str, float]

    @property
    def chosen(self) -> str:
        return min(self.times, key=lambda way: self.times[way])


class Planner:
    """Ways are timed in `arena`. `variant` names what else the times depend on, such as options of the convolutions.
    `deterministic`: times are to decide nothing, as each way has an order of sums of its own: ask `first`."""

    def __init__(self, gpu: Gpu, cache: Cache, arena: Arena, variant: str, deterministic: bool = False) -> None:
        self._gpu, self._cache, self._arena = gpu, cache, arena
        self.deterministic = deterministic
        self._name = f"ways-{sources_digest()[:16]}-{variant}"
        self._times: dict[str, dict[str, float]] = self._read()
        self._known = len(self._times)
        self._for_now: dict[str, dict[str, float]] = {}  # where memory or time ran out: not for the next process

    def fastest(self, node: str, problem: str, ways: Mapping[str, Way]) -> Decision:
        """The fastest way. `problem` says all that the times depend on.

        While ways are timed, all that they read and write, and their scratch, lies in the arena, with random contents.
        Where one of them could not be lowered or timed for a passing reason, the answer is not kept on disk. Raises
        GraphError where no way can be had.
        """
        question = f"{problem}: {' or '.join(ways)}"
        times = self._times.get(question) or self._for_now.get(question)
        if times is None:
            times, lasts = self._measured(ways)
            (self._times if lasts else self._for_now)[question] = times
            log.debug("%s: %s", problem, times)
        return Decision(node, problem, times)

    @staticmethod
    def first(ways: Mapping[str, Way]) -> str:
        """The first way that this GPU can take. Raises GraphError where there is none, or where that cannot be found
        out now."""
        reasons: dict[str, GraphError] = {}
        for name, way in ways.items():
            try:
                way()
            except TransientError:
                raise
            except GraphError as error:
                reasons[name] = error
            else:
                return name
        raise _most_useful(reasons)

    def _measured(self, ways: Mapping[str, Way]) -> tuple[dict[str, float], bool]:
        """Milliseconds of each way; where only one can be taken, 0 for that. And whether the next process would find
        the same."""
        programs: dict[str, Program] = {}
        reasons: dict[str, GraphError] = {}
        times = dict.fromkeys(ways, math.inf)
        for name, way in ways.items():
            try:
                programs[name] = way()
            except GraphError as error:
                reasons[name] = error
        for name, program in programs.items():
            try:
                times[name] = self._time_ms(program) if len(programs) > 1 else 0.0
            except GraphError as error:
                reasons[name] = error
        if min(times.values()) == math.inf:
            raise _most_useful(reasons)
        return times, not any(isinstance(reason, TransientError) for reason in reasons.values())

    def save(self) -> None:
        """Keep the times taken since the last call on disk."""
        if len(self._times) > self._known:
            self._times = {**self._read(), **self._times}  # another process may have written meanwhile
            self._cache.write(self._name, json.dumps(self._times, indent=0).encode())
            self._known = len(self._times)

    def _read(self) -> dict[str, dict[str, float]]:
        body = self._cache.read(self._name)
        return json.loads(body) if body else {}

    def _time_ms(self, program: Program) -> float:
        with self._placed({*program.buffers(), *program.scratch}):
            return self._gpu.time_ms(partial(run, program.launches))

    @contextlib.contextmanager
    def _placed(self, buffers: set[Buffer]) -> Iterator[None]:
        """Have the buffers in the arena for a while, side by side."""
        address = self._arena.reserve(sum(aligned(buffer.num_bytes) for buffer in buffers))
        before = {buffer: buffer.address for buffer in buffers}
        for buffer in sorted(buffers, key=lambda buffer: buffer.name):
            buffer.address = address
            if buffer.num_bytes:
                self._gpu.fill_random(address, buffer.num_bytes, buffer.dtype)
            address += aligned(buffer.num_bytes)
        try:
            yield
        finally:
            for buffer, old in before.items():
                buffer.address = old


def _most_useful(reasons: Mapping[str, GraphError]) -> GraphError:
    """Why no way can be taken: of the way in which nothing is fused, if there is one."""
    return reasons.get("separate") or next(iter(reasons.values()))

"""Which of several ways to compute the same is the fastest here: whole sequences of launches, timed once per problem.

The times are kept on disk beside the choice of cuDNN plans, so the next start only builds what won.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from common.disk_cache import Cache
from graph_passes.errors import GraphError
from graph_passes.executors.cuda.arena import Arena
from graph_passes.executors.cuda.device import Gpu
from graph_passes.executors.cuda.kernels import sources_digest
from graph_passes.executors.cuda.program import Buffer, Launch, run
from graph_passes.passes.memory import aligned

Way = Callable[[], "list[Launch]"]  # emits its launches when it is called
log = logging.getLogger("graph_passes.cuda")


@dataclass(frozen=True)
class Decision:
    """What was chosen for one node of the graph. `times`: milliseconds of each way."""

    node: str
    problem: str
    times: dict[str, float]

    @property
    def chosen(self) -> str:
        return min(self.times, key=lambda way: self.times[way])


class Planner:
    """Ways are timed in `arena`. `variant` names what else the times depend on, such as options of the convolutions.
    `deterministic`: times decide nothing, as each way has an order of sums of its own; the first way is taken."""

    def __init__(self, gpu: Gpu, cache: Cache, arena: Arena, variant: str, deterministic: bool = False) -> None:
        self._gpu, self._cache, self._arena, self._deterministic = gpu, cache, arena, deterministic
        self._name = f"ways-{sources_digest()[:16]}-{variant}"
        self._times: dict[str, dict[str, float]] = self._read()
        self._known = len(self._times)

    def fastest(self, node: str, problem: str, ways: Mapping[str, Way],
                scratch: Iterable[Buffer]) -> tuple[Decision, list[Launch]]:
        """The launches of the fastest way. `problem` says all that the times depend on.

        While ways are timed, all that they read and write, and `scratch`, lies in the arena, with random contents.
        Raises GraphError where no way can be had.
        """
        if self._deterministic:
            way, emit = next(iter(ways.items()))
            return Decision(node, problem, {way: float("nan")}), emit()
        times = self._times.get(problem, {})
        if set(times) != set(ways):
            emitted: dict[str, list[Launch]] = {}
            times, reason = {}, ""
            for way, emit in ways.items():
                try:
                    emitted[way] = emit()
                    times[way] = self._time_ms(emitted[way], scratch)
                except GraphError as error:
                    times[way], reason = float("inf"), str(error)
            decision = Decision(node, problem, times)
            if times[decision.chosen] == float("inf"):
                raise GraphError(reason)
            self._times[problem] = times
            log.debug("%s: %s", problem, times)
            return decision, emitted[decision.chosen]
        decision = Decision(node, problem, times)
        return decision, ways[decision.chosen]()

    def save(self) -> None:
        """Keep the times taken since the last call on disk."""
        if len(self._times) > self._known:
            self._times = {**self._read(), **self._times}  # another process may have written meanwhile
            self._cache.write(self._name, json.dumps(self._times, indent=0).encode())
            self._known = len(self._times)

    def _read(self) -> dict[str, dict[str, float]]:
        body = self._cache.read(self._name)
        return json.loads(body) if body else {}

    def _time_ms(self, launches: list[Launch], scratch: Iterable[Buffer]) -> float:
        buffers = {buffer for launch in launches for buffer in (*launch.reads, *launch.writes)} | set(scratch)
        with self._placed(buffers):
            return self._gpu.time_ms(partial(run, launches))

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

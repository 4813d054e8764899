"""Times of problems on this GPU. A problem is a sequence of launches; each is timed once, in the same way.

The times are kept on disk beside the choice of cuDNN plans, so the next start neither lowers nor times anything.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from common.disk_cache import Cache
from common.phases import TIMING, phase
from graph_passes.errors import GraphError, TransientError
from graph_passes.executors.cuda.arena import Arena
from graph_passes.executors.cuda.device import Gpu
from graph_passes.executors.cuda.kernel_library import sources_digest
from graph_passes.executors.cuda.program import Buffer, Program, run
from graph_passes.passes.memory import aligned

Lower = Callable[[], Program]  # emits the launches when called; raises GraphError if this GPU cannot run them
log = logging.getLogger("graph_passes.cuda")


class Planner:
    """Times problems on one GPU, in the memory of `arena`. `variant` names all further settings that times depend on,
    such as options of the convolutions. `deterministic`: times must not decide between kernels, because each kernel
    sums in its own order.
    """

    def __init__(self, gpu: Gpu, cache: Cache, arena: Arena, variant: str, deterministic: bool = False) -> None:
        self._gpu, self._cache, self._arena = gpu, cache, arena
        self.deterministic = deterministic
        self._name = f"times-{sources_digest()[:16]}-{variant}"
        self._times: dict[str, float] = self._read()
        self._known = len(self._times)
        # problems for which memory or time ran out; these are not stored for the next process
        self._transient: dict[str, TransientError] = {}

    @phase(TIMING)
    def times(self, problems: Mapping[str, Lower], others: Iterable[Lower] = ()) -> dict[str, float]:
        """The time of each problem in ms, by the problem's name; infinite for a problem that this GPU cannot run. The
        name must contain everything on which the time depends.

        Problems without a known time are all lowered before the first is timed, together with the `others`, which need
        no times. So all kernels are known early and are compiled in parallel.

        While a problem is timed, its tensors and scratch memory are in the arena, with random contents. A problem that
        could not be lowered or timed for a transient reason is not stored on disk.
        """
        programs = {name: self._lowered(name, lower) for name, lower in problems.items()
                    if name not in self._times and name not in self._transient}
        for lower in others if programs else ():
            with contextlib.suppress(GraphError):  # the lowering reports it
                lower()
        for name, program in programs.items():
            if program is not None:
                self._measure(name, program)
        return {name: self._times.get(name, math.inf) for name in problems}

    def transient_error(self, problem: str) -> TransientError | None:
        """The error for which this problem has no time in this process, if the next process may succeed; otherwise
        None.
        """
        return self._transient.get(problem)

    def _lowered(self, name: str, lower: Lower) -> Program | None:
        try:
            return lower()
        except GraphError as error:
            self._refuse(name, error)
            return None

    def _measure(self, name: str, program: Program) -> None:
        try:
            self._times[name] = self._time_ms(program)
        except GraphError as error:
            self._refuse(name, error)
        else:
            log.debug("%s: %.4f ms", name, self._times[name])

    def _refuse(self, name: str, error: GraphError) -> None:
        """Record that this GPU cannot run the problem. If the reason is transient, the record holds for this process
        only.
        """
        if isinstance(error, TransientError):
            self._transient[name] = error
        else:
            self._times[name] = math.inf

    def save(self) -> None:
        """Save the times measured since the last call on disk."""
        if len(self._times) > self._known:
            self._times = {**self._read(), **self._times}  # another process may have written meanwhile
            self._cache.write(self._name, json.dumps(self._times, indent=0).encode())
            self._known = len(self._times)

    def _read(self) -> dict[str, float]:
        body = self._cache.read(self._name)
        return json.loads(body) if body else {}

    def _time_ms(self, program: Program) -> float:
        program.load()
        with self._placed({*program.buffers(), *program.scratch}):
            return self._gpu.time_ms(partial(run, program.launches))

    @contextlib.contextmanager
    def _placed(self, buffers: set[Buffer]) -> Iterator[None]:
        """Place the buffers one after the other in the arena during the `with` block."""
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


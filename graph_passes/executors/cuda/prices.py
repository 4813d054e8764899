"""Prices of candidates on a GPU: the times of their launches, each lowered and timed by itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

from graph_passes.candidates import Candidate, Candidates
from graph_passes.choice import LAST_RESORT, Choice, choices_of, chosen_of, deterministic, undecided
from graph_passes.errors import GraphError, TransientError
from graph_passes.executors.cuda.builder import ONE_FORM, Builder, padded_shape
from graph_passes.executors.cuda.capacity import check_sizes
from graph_passes.executors.cuda.lowering import Persistent, bound_buffers, lower_nodes
from graph_passes.executors.cuda.parameters import Store
from graph_passes.executors.cuda.program import Buffer, Program
from graph_passes.executors.cuda.toolchain import Toolchain
from graph_passes.graph import Ref
from graph_passes.operators import OPERATORS
from graph_passes.passes.precision import node_dtypes, role_of
from graph_passes.problems import Tensors


class Prices:
    """The prices for one compilation (`choice.py`), for inputs of these shapes."""

    def __init__(self, input_shapes: Mapping[str, Sequence[int]], store: Store, persistent: Persistent,
                 tools: Toolchain) -> None:
        self._input_shapes, self._store, self._persistent, self._tools = input_shapes, store, persistent, tools
        self._priced: tuple[Candidates, list[float]] | None = None

    def __call__(self, table: Candidates) -> list[float]:
        """Milliseconds of each candidate, 0 if it is taken in any case. In deterministic runs, the prices of
        `deterministic` for the candidates that this GPU can run. Raises TransientError if the prices cannot be
        determined now.
        """
        lowering = _Lowering(table, self._input_shapes, self._store, self._persistent, self._tools)
        open_places, sure_places = undecided(table)
        listed = list(table)
        open_ones, sure = ([listed[place] for place in sorted(places)] for places in (open_places, sure_places))
        ask = self._ranks if self._tools.planner.deterministic else self._times
        found = dict.fromkeys(sure, 0.0) | ask(table, lowering, open_ones, sure)
        prices = [found.get(each, math.inf) for each in listed]
        self._priced = table, prices
        return prices

    @property
    def choices(self) -> list[Choice]:
        """The kernels that had rivals, with the times of all candidates."""
        return choices_of(*self._priced) if self._priced and not self._tools.planner.deterministic else []

    def _times(self, table: Candidates, lowering: _Lowering, open_ones: Sequence[Candidate],
               sure: Sequence[Candidate]) -> dict[Candidate, float]:
        problems = {each: lowering.tensors.problem(each, self._store.dtype) for each in open_ones
                    if not _is_last_resort(each)}
        times = self._tools.planner.times(
            {problem: partial(lowering.program, each) for each, problem in problems.items()},
            [partial(lowering.program, each) for each in sure])
        found = {each: times[problem] for each, problem in problems.items()}
        self._check_last_resorts(found, problems)
        return found | {each: LAST_RESORT for each in open_ones if _is_last_resort(each)}

    def _check_last_resorts(self, times: Mapping[Candidate, float], problems: Mapping[Candidate, str]) -> None:
        """Raise TransientError if an INT8 convolution would get its far slower last resort only because a faster kernel
        could not be timed now, for example for lack of memory."""
        faster: dict[str, list[Candidate]] = {}
        for each in problems:
            if OPERATORS[each.op].form_of == "QuantisedConvolution":
                faster.setdefault(each.node.name, []).append(each)
        for rivals in faster.values():
            errors = [error for each in rivals if (error := self._tools.planner.transient_error(problems[each]))]
            if errors and all(times[each] == math.inf for each in rivals):
                raise errors[0]

    def _ranks(self, table: Candidates, lowering: _Lowering, open_ones: Sequence[Candidate],
               sure: Sequence[Candidate]) -> dict[Candidate, float]:
        """The prices of `deterministic`. Only candidates that would be taken are lowered, repeatedly until this GPU can
        run all of them, so no kernel is compiled in vain.
        """
        ranks = dict(zip(table, deterministic(table), strict=True))
        found = dict.fromkeys(sure, 0.0) | {each: ranks[each] for each in open_ones}
        unknown = {each for each in open_ones if ranks[each] < math.inf}
        while tried := unknown.intersection(chosen_of(table, [found.get(each, math.inf) for each in table])):
            unknown -= tried
            found |= {each: math.inf for each in tried if not lowering.is_possible(each)}
        return found


def _is_last_resort(each: Candidate) -> bool:
    """Whether this is the INT8 convolution kernel for all shapes. This kernel is far slower than the other kernels, so
    it is not timed, and taken only if this GPU can run no other kernel.
    """
    return each.op == "QuantisedConvolution"


class _Lowering:
    """The launches of single candidates of a table."""

    def __init__(self, table: Candidates, input_shapes: Mapping[str, Sequence[int]], store: Store,
                 persistent: Persistent, tools: Toolchain) -> None:
        self.tensors = Tensors(table, input_shapes)
        check_sizes(self.tensors.shapes)
        self._buffers = bound_buffers(table.graph, store, persistent)
        self._store, self._persistent, self._tools = store, persistent, tools

    def program(self, each: Candidate) -> Program:
        """The launches of a candidate. Raises GraphError if this GPU cannot run it."""
        node = each.node.replace(name=f"{each.node.name} alone")  # the new name is not a tensor of the table
        shapes, dtypes, buffers = dict(self.tensors.shapes), dict(self.tensors.dtypes), dict[Ref, Buffer]()
        for role, ref in zip(OPERATORS[node.op].input_names(node), node.inputs, strict=True):
            shape = shapes[ref]
            if len(shape) > 1 and role_of(role) not in ONE_FORM:
                shape = padded_shape(shape)  # most rules write the tensor in the padded form
            buffers[ref] = self._buffers.get(ref) or Buffer(f"{ref.node}:{ref.output}", shape, dtypes[ref])
        own = zip(node.refs(), each.writes, self.tensors.outputs(node), node_dtypes(node), strict=True)
        for ref, tensor, shape, dtype in own:
            shapes[ref], dtypes[ref] = shape, dtype
            if tensor in self._buffers:
                buffers[ref] = self._buffers[tensor]
        builder = Builder(shapes, dtypes, buffers, self._store.dtype, self._persistent, self._tools)
        lower_nodes(builder, [node])
        return builder.program

    def is_possible(self, each: Candidate) -> bool:
        try:
            self.program(each)
        except TransientError:
            raise
        except GraphError:
            return False
        return True

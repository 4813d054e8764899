"""Prices of candidates, and the graph of the candidates that are cheapest together.

On a GPU a price is a measured time, taken in the same way for all candidates (`executors/cuda/prices.py`). This module
has the prices without a GPU: `fewest` counts nodes, for the reference executor and the memory check; `repeatable` is
for runs in which no clock may decide. Modelled times are not used as prices: the most optimistic model would win.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from graph_passes.candidates import Candidate, Candidates
from graph_passes.cover import NoCoverError, Option, cover, open_and_sure
from graph_passes.executors.cuda.kernels import quantised_conv, quantised_conv_stream
from graph_passes.graph import Graph, Ref
from graph_passes.operators import OPERATORS
from graph_passes.operators.rnn import ALGORITHMS

Price = Callable[[Candidates], Sequence[float]]  # of each candidate, in the table's order; infinite: not available
_OWN = 1e-3  # surcharge for a kernel that only some GPUs can run, against an equal node
LAST_RESORT, _REFUSED = 1e6, 1e9  # more than any other price
_TIE = 1e-9  # surcharge for a fusion, and for each tensor that is written, to break ties


def covered(table: Candidates, price: Price) -> Graph:
    """The graph of the candidates with the least total price."""
    chosen = chosen_of(table, price(table))
    return table.graph_of(chosen)


def chosen_of(table: Candidates, prices: Sequence[float]) -> list[Candidate]:
    """The candidates that are taken: first the graph's own nodes in their order, then the others."""
    listed = sorted(zip(table, prices, strict=True), key=_by_name)
    options = [Option(frozenset(each.node.inputs), each.made, price + _tie(each)) for each, price in listed]
    try:
        taken = cover(options, _given(table), table.graph.outputs, table.updated)
    except NoCoverError:  # a node that no candidate computes stays; the executor that has to run it says why it cannot
        options = [option if each.is_fused or option.cost < math.inf else option._replace(cost=_REFUSED)
                   for option, (each, _) in zip(options, listed, strict=True)]
        taken = cover(options, _given(table), table.graph.outputs, table.updated)
    return [listed[number][0] for number in taken]


def _tie(each: Candidate) -> float:
    return _TIE * (each.is_fused + len(each.made))


def _given(table: Candidates) -> set[Ref]:
    return {ref for node in table.graph if node.is_variable for ref in node.refs()}


def undecided(table: Candidates) -> tuple[set[int], set[int]]:
    """Two sets of table indices: candidates whose prices decide whether they are taken, and candidates that are taken
    at any price. All other candidates are never taken."""
    options = [Option(frozenset(each.node.inputs), each.made, 1.0) for each in table]
    return open_and_sure(options, _given(table), table.graph.outputs, table.updated)


def limited(price: Price, keep: Callable[[Candidate], bool]) -> Price:
    """The same prices, but infinite for the fusions that are switched off."""
    def prices(table: Candidates) -> list[float]:
        return [of_each if not each.is_fused or keep(each) else math.inf
                for each, of_each in zip(table, price(table), strict=True)]

    return prices


class Choice(NamedTuple):
    """A taken candidate that had rivals. `rivals`: the other candidates for one of its tensors, with their prices."""

    node: str
    kernel: str
    price: float
    rivals: tuple[tuple[str, float], ...]


def choices_of(table: Candidates, prices: Sequence[float]) -> list[Choice]:
    """Return the taken candidates that have rivals, in the graph's order."""
    price_of, found = dict(zip(table, prices, strict=True)), []
    place = {ref: number for number, node in enumerate(table.graph) for ref in node.refs()}
    for each in sorted(chosen_of(table, prices), key=lambda each: min(place.get(ref, len(place)) for ref in each.made)):
        others = {other for tensor in each.made for other in table.makers(tensor)} - {each}
        rivals = sorted(((other.label, price_of[other]) for other in others if price_of[other] < math.inf),
                        key=lambda rival: rival[::-1])
        if rivals:
            found.append(Choice(each.node.name, each.label, price_of[each], tuple(rivals)))
    return found


def format_choices(choices: Iterable[Choice]) -> str:
    """The kernels that had rivals, as text: each with its time in ms, and its rivals with theirs. Nodes with equal
    entries share a line."""
    groups: dict[tuple[object, ...], list[Choice]] = {}
    for choice in choices:
        groups.setdefault(choice[1:], []).append(choice)
    lines = []
    for group in groups.values():
        first, more = group[0], len(group) - 1
        lines.append(f"{first.kernel:<44}{first.price:>9.4f} ms  {first.node}{f' and {more} more' if more else ''}")
        lines += [f"  or {kernel:<39}{milliseconds:>9.4f} ms" for kernel, milliseconds in first.rivals]
    return "\n".join(lines)


def _by_name(priced: tuple[Candidate, float]) -> tuple[object, ...]:
    """A sort key that does not depend on the order of the rules, so that ties are always broken alike: the graph's own
    nodes first; fused ones by name, repeatable candidates first."""
    each, _ = priced
    return (True, each.node.name, _rank(each), each.label) if each.is_fused else (False,)


def fewest(table: Candidates) -> list[float]:
    """Prices without a device: as few nodes as possible. If two choices are equal, the operator that runs on all
    devices wins."""
    return [1.0 + _OWN * _is_own(each) for each in table]


def _is_own(each: Candidate) -> bool:
    return (each.op in OPERATORS and bool(OPERATORS[each.op].form_of)) or "RNN" in each.op


def repeatable(table: Candidates) -> list[float]:
    """Prices for deterministic runs: the first candidate of those that compute the same, without timing. All of these
    kernels sum in a fixed order, and the choice is the same on every device that supports them."""
    return [_rank(each) for each in table]


# The kernels of a convolution in INT8; the one that is faster at most shapes comes first.
_IN_INT8 = ("QuantisedConvTaps", "QuantisedConvSquares", *(f"QuantisedConv {tile}" for tile in quantised_conv.TILES),
            *(f"QuantisedConvStream {tile}" for tile in quantised_conv_stream.TILES), "QuantisedConvolution")


def _rank(each: Candidate) -> float:
    """1 for each node, plus a small amount for later algorithms and kernels; infinite for candidates that only timing
    could choose."""
    if each.op.startswith("RNN"):
        return 1.0 + ALGORITHMS.index(each["algorithm"])
    if each.label in _IN_INT8:
        return 1.0 + _OWN * _IN_INT8.index(each.label)
    ends = ("ConvolutionRelu", "ConvolutionAddRelu")
    has_bias = each.op in ends or (each.op == "Convolution" and not each["no_bias"])
    return 1.0 if (not each.is_fused or OPERATORS[each.op].repeatable) and not has_bias else math.inf

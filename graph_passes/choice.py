"""Defines prices of candidates, and builds the graph of the candidates with the least total price.

On a GPU a price is a measured time, taken in the same way for all candidates (`executors/cuda/prices.py`). This module
has the prices without a GPU: `fewest` counts nodes, for the reference executor; `plain` is for the memory check;
`deterministic` is for runs in which measured times must not decide. Modelled times are not used as prices: the most
optimistic model would win.
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

# the price of each candidate, in the table's order; infinite: not available
Price = Callable[[Candidates], Sequence[float]]
_OWN = 1e-3  # surcharge for a kernel that only some GPUs can run, compared with an equal node for all GPUs
LAST_RESORT, _REFUSED = 1e6, 1e9  # more than any other price
_TIE = 1e-9  # surcharge to break ties: for a fusion, and for each tensor that is written


def covered(table: Candidates, price: Price) -> Graph:
    """The graph of the candidates with the least total price."""
    chosen = chosen_of(table, price(table))
    return table.graph_of(chosen)


def chosen_of(table: Candidates, prices: Sequence[float]) -> list[Candidate]:
    """The candidates that are taken: first the graph's own nodes in their order, then fused nodes."""
    listed = sorted(zip(table, prices, strict=True), key=_by_name)
    options = [Option(frozenset(each.node.inputs), each.made, price + _tie(each)) for each, price in listed]
    try:
        taken = cover(options, _given(table), table.graph.outputs, table.updated)
    # a node that no candidate computes stays; the executor that must run the node raises the error
    except NoCoverError:
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
    """The prices of `price`, but infinite for fusions that `keep` rejects."""
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
    """The kernels that had rivals, as text: each kernel and each rival with its time in ms. Nodes with equal entries
    share a line.
    """
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
    """A sort key that does not depend on the order of the rules, so that ties are always broken alike. The graph's own
    nodes come first. Fused nodes are sorted by name, plain candidates first.
    """
    each, _ = priced
    return (True, each.node.name, not _is_plain(each), _rank(each), each.label) if each.is_fused else (False,)


def fewest(table: Candidates) -> list[float]:
    """Prices without a device: as few nodes as possible. If two choices have equally many nodes, the operator that runs
    on all devices wins.
    """
    return [1.0 + _OWN * _is_own(each) for each in table]


def _is_own(each: Candidate) -> bool:
    return (each.op in OPERATORS and bool(OPERATORS[each.op].form_of)) or "RNN" in each.op


def plain(table: Candidates) -> list[float]:
    """Prices for the memory check, which fuses only by operators that are `plain`."""
    return [_rank(each) if _is_plain(each) else math.inf for each in table]


def deterministic(table: Candidates) -> list[float]:
    """Prices for deterministic runs: as few nodes as possible, with kernels that sum in a fixed order. `_rank` decides
    between kernels for the same nodes.

    The bits of deterministic runs depend on these prices, so they change only with a major version. By an H100's saved
    times, the kernels of ResNet-50's step that have rivals take 18.64 ms with these prices, and 18.17 ms if the times
    are the prices (batch 256).
    """
    return [math.inf if each.op in _VARYING or _has_bias(each) else _rank(each) for each in table]


_VARYING = ("ConvolutionStatistics",)  # operators whose sums cuDNN computes in a varying order
# Kernels for Hopper that are faster than the kernels for all GPUs, at every shape that they support.
_PREFERRED = ("StemForward", "StemWeights")
# The kernels of a convolution in INT8; kernels that are faster at most shapes come first.
_IN_INT8 = ("QuantisedConvTaps", "QuantisedConvSquares", *(f"QuantisedConv {tile}" for tile in quantised_conv.TILES),
            *(f"QuantisedConvStream {tile}" for tile in quantised_conv_stream.TILES), "QuantisedConvolution")


def _rank(each: Candidate) -> float:
    """1 for each node, plus a small amount for later algorithms and kernels."""
    if each.op.startswith("RNN"):
        return 1.0 + ALGORITHMS.index(each["algorithm"])
    if each.label in _IN_INT8:
        return 1.0 + _OWN * _IN_INT8.index(each.label)
    return 1.0 + _OWN * (-1 if each.op in _PREFERRED else _is_own(each))


def _is_plain(each: Candidate) -> bool:
    if each.op.startswith("RNN") or each.label in _IN_INT8:
        return True
    return not _has_bias(each) and (not each.is_fused or OPERATORS[each.op].plain)


def _has_bias(each: Candidate) -> bool:
    """Whether this is cuDNN's convolution with a bias: only timing could choose it."""
    return each.op in ("ConvolutionRelu", "ConvolutionAddRelu") or (each.op == "Convolution" and not each["no_bias"])

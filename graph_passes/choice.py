"""Which candidates run: prices of candidates, and the graph of those that are cheapest together.

Where a device can be asked, a price is a time, measured for all candidates alike (`executors/cuda/prices.py`). Here are
the prices without one: `fewest`, nodes, for the reference executor; `plain`, for the memory check; and `deterministic`,
for runs in which no clock may decide. Times that are only modelled are no prices: the most flattering would win.
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

Price = Callable[[Candidates], Sequence[float]]  # of each candidate, in the table's order; infinite: it cannot be had
_OWN = 1e-3  # what one of two equal nodes is dearer that is a kernel for some GPUs only
LAST_RESORT, _REFUSED = 1e6, 1e9  # more than anything else takes
_TIE = 1e-9  # by which a fusion is dearer, and each tensor that is written, where prices are equal


def covered(table: Candidates, price: Price) -> Graph:
    """The graph of the candidates of the least total price."""
    chosen = chosen_of(table, price(table))
    return table.graph_of(chosen)


def chosen_of(table: Candidates, prices: Sequence[float]) -> list[Candidate]:
    """The candidates that are taken, those of the graph first and in its order."""
    listed = sorted(zip(table, prices, strict=True), key=_by_name)
    options = [Option(frozenset(each.node.inputs), each.made, price + _tie(each)) for each, price in listed]
    try:
        taken = cover(options, _given(table), table.graph.outputs, table.updated)
    except NoCoverError:  # a node that nothing computes here is left as it is: who is to run it says why not
        options = [option if each.is_fused or option.cost < math.inf else option._replace(cost=_REFUSED)
                   for option, (each, _) in zip(options, listed, strict=True)]
        taken = cover(options, _given(table), table.graph.outputs, table.updated)
    return [listed[number][0] for number in taken]


def _tie(each: Candidate) -> float:
    return _TIE * (each.is_fused + len(each.made))


def _given(table: Candidates) -> set[Ref]:
    return {ref for node in table.graph if node.is_variable for ref in node.refs()}


def undecided(table: Candidates) -> tuple[set[int], set[int]]:
    """The places in the table of those candidates of which prices decide whether they are taken, and of those that are
    taken whatever their prices. All others are of no use."""
    options = [Option(frozenset(each.node.inputs), each.made, 1.0) for each in table]
    return open_and_sure(options, _given(table), table.graph.outputs, table.updated)


def limited(price: Price, keep: Callable[[Candidate], bool]) -> Price:
    """The same prices, but infinite ones for the fusions that are not to be kept."""
    def prices(table: Candidates) -> list[float]:
        return [of_each if not each.is_fused or keep(each) else math.inf
                for each, of_each in zip(table, price(table), strict=True)]

    return prices


class Choice(NamedTuple):
    """What was taken where there was something to choose. `rivals`: who else makes one of its tensors, and at what
    price."""

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
    """The kernels that were taken where there was something to choose, each with its milliseconds, and its rivals with
    theirs; nodes of which all that is alike on one line."""
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
    """An order that does not depend on the rules', so that ties do not either: of equal ones what is plain is rather
    taken, and of that the first."""
    each, _ = priced
    return (True, each.node.name, not _is_plain(each), _rank(each), each.label) if each.is_fused else (False,)


def fewest(table: Candidates) -> list[float]:
    """Where no device can be asked: as few nodes as can be; of two that do the same the one for all devices."""
    return [1.0 + _OWN * _is_own(each) for each in table]


def _is_own(each: Candidate) -> bool:
    return (each.op in OPERATORS and bool(OPERATORS[each.op].form_of)) or "RNN" in each.op


def plain(table: Candidates) -> list[float]:
    """For the memory check: nothing is fused but by operators that are `plain`."""
    return [_rank(each) if _is_plain(each) else math.inf for each in table]


def deterministic(table: Candidates) -> list[float]:
    """For runs whose equal inputs give equal bits: as few nodes as there can be, of kernels that sum in a fixed order.
    `_rank` decides between kernels for the same nodes.

    The bits of such runs depend on it, so it changes with a major version only. ResNet-50's kernels take 18.64 ms by an
    H100's saved times, and 18.17 ms if the times choose (batch 256, only the part that has a choice)."""
    return [math.inf if each.op in _VARYING or _has_bias(each) else _rank(each) for each in table]


_VARYING = ("ConvolutionStatistics",)  # cuDNN adds these sums up in a varying order
# Kernels for some GPUs that are faster than those for all at every shape that they take.
_PREFERRED = ("StemForward", "StemWeights")
# The kernels of a convolution in INT8; the one that is faster at most shapes comes first.
_IN_INT8 = ("QuantisedConvTaps", "QuantisedConvSquares", *(f"QuantisedConv {tile}" for tile in quantised_conv.TILES),
            *(f"QuantisedConvStream {tile}" for tile in quantised_conv_stream.TILES), "QuantisedConvolution")


def _rank(each: Candidate) -> float:
    """1 for each node, and little more for later algorithms and kernels."""
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
    """Whether it is a convolution of cuDNN's with an epilogue, which is taken for its speed alone."""
    return each.op in ("ConvolutionRelu", "ConvolutionAddRelu") or (each.op == "Convolution" and not each["no_bias"])

"""The gradient of a BatchNorm's input, with the sum with the gradient of whatever else reads that input.

    before    dy, x, ..., dgamma, dbeta -> BatchNormReluBackwardApply -> dx;  dx, other -> elemwise_add `s`
    after     dy, x, ..., dgamma, dbeta, other -> BatchNormReluBackwardApplyAdd `s`

dx is neither written nor read: at the blocks of a network whose BatchNorms come first (ResNet v2), where a sum goes to
a BatchNorm and past it.
"""

from __future__ import annotations

from collections.abc import Iterator

from graph_passes.candidates import Candidate, Candidates
from graph_passes.graph import Node


def norm_grad_add(table: Candidates, add: Candidate) -> Iterator[Node]:
    """Of elemwise_add."""
    for one, other in (add.node.inputs, reversed(add.node.inputs)):
        for apply in table.makers(one, "BatchNormBackwardApply", "BatchNormReluBackwardApply"):
            if apply.node.get("no_factors", True):
                yield apply.node.derive(f"{apply.op}Add", add.node.name, (*apply.node.inputs, other))

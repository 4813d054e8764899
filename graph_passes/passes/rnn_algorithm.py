"""Which of cuDNN's algorithms a recurrent layer takes.

    before    RNNTrain, RNNBackward
    after     RNNTrain(algorithm=persist_static), RNNBackward(algorithm=persist_static)

A layer and its backward pass, which reads the `reserve` that the algorithm has left, have one; inference has its own.
The persistent ones keep the weights on the chip, which is faster where they fit and few sequences share them.
"""

from __future__ import annotations

from collections.abc import Iterator

from graph_passes.candidates import Candidate, Candidates
from graph_passes.graph import Node
from graph_passes.operators.rnn import ALGORITHMS


def rnn_algorithm(table: Candidates, layer: Candidate) -> Iterator[Node]:
    """Of RNN and RNNTrain; `operators/rnn.py` has the algorithms."""
    for algorithm in ALGORITHMS:
        yield layer.node.with_attrs(algorithm=algorithm)


def rnn_backward(table: Candidates, layer: Candidate) -> Iterator[Node]:
    """Of RNNTrain: the backward pass of another one that computes the same, from this one's `reserve`."""
    for other in table.makers(layer.output("output"), "RNNTrain"):
        reserve = other.output("reserve")
        for backward in table.readers(reserve, "RNNBackward"):
            inputs = tuple(layer.output("reserve") if ref == reserve else ref for ref in backward.node.inputs)
            yield backward.node.with_attrs(algorithm=layer["algorithm"]).replace(inputs=inputs)

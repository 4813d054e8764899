"""Embedding: rows of a matrix by number, and the gradient of the matrix."""

from __future__ import annotations

import math

from graph_passes.executors.cuda.builder import Builder, Launches, require
from graph_passes.executors.cuda.kernel_library import count, threads
from graph_passes.executors.cuda.operands import In, Out
from graph_passes.executors.cuda.parameters import VECTOR
from graph_passes.graph import Node

COLUMNS = 128  # threads of a gradient block, one vector each


def embedding(builder: Builder, node: Node) -> None:
    y, vectors = builder.output(node), _row_vectors(node)
    builder.launch(node, "embedding.cu", builder.kernel("embedding"), *threads(builder.vectors(y)),
                   In(builder.input(node, "tokens")), In(builder.input(node, "weight")), Out(y),
                   count(builder.vectors(y)), count(vectors), count(node["input_dim"]))


def wgrad(builder: Builder, node: Node) -> None:
    tokens, words, vectors = builder.input(node, "tokens"), node["input_dim"], _row_vectors(node)
    builder.launch(node, "embedding.cu", builder.kernel("embedding_wgrad"), (words, -(-vectors // COLUMNS), 1),
                   (COLUMNS, 1, 1), In(builder.input(node, "out_grad")), In(tokens), Out(builder.output(node)),
                   count(math.prod(tokens.shape)), count(vectors), count(words))


def _row_vectors(node: Node) -> int:
    """Vectors of a row. The matrix may also be a classifier's, whose rows are padded to a multiple of 8."""
    words, channels = node["input_dim"], node["output_dim"]
    require(channels % VECTOR == 0, node, f"has output_dim={channels}: use a multiple of {VECTOR}")
    require(words % VECTOR == 0, node, f"has input_dim={words}: use a multiple of {VECTOR}")
    return channels // VECTOR


LAUNCHES: Launches = {"Embedding": embedding, "EmbeddingWgrad": wgrad}

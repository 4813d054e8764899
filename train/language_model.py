"""A word language model as a classifier of the next word: embedding, recurrent layers, softmax with the embedding's
weights (Press and Wolf, arXiv:1608.05859)."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from common.mxnet_compat import mx
from graph_passes import Graph, Ref

# standard deviation of initial values; the usual value for input embeddings is too large, because this embedding also
# produces the scores
EMBEDDING_DEVIATION = 0.1


@dataclass(frozen=True)
class LanguageModel:
    """The network for batches of `sequences` sequences of `steps` words each, as pipelines/text.py gives them.

    Inputs: `data` (steps * sequences, 1, 1, 1), word indices, and `softmax_label` (steps * sequences,), the indices of
    the next words. Each batch starts from states of 0.
    """

    words: int  # size of the vocabulary
    hidden: int  # units of a recurrent layer, and length of a word's vector
    layers: int
    steps: int
    sequences: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the inputs."""
        tokens = self.steps * self.sequences
        return {"data": (tokens, 1, 1, 1), "softmax_label": (tokens,)}

    @cached_property
    def graph(self) -> Graph:
        weight = mx.sym.var("embedding_weight")
        x = mx.sym.Embedding(mx.sym.var("data"), weight, input_dim=self.words, output_dim=self.hidden, name="embedding")
        x = mx.sym.Reshape(x, shape=(self.steps, self.sequences, self.hidden), name="sequences")
        state, cell = (mx.sym.zeros(shape=(self.layers, self.sequences, self.hidden), name=name)
                       for name in ("state", "cell"))
        x = mx.sym.RNN(x, mx.sym.var("rnn_parameters"), state, cell, mode="lstm", state_size=self.hidden,
                       num_layers=self.layers, name="rnn")
        x = mx.sym.Reshape(x, shape=(-1, self.hidden), name="words")
        x = mx.sym.FullyConnected(x, weight, mx.sym.var("scores_bias"), num_hidden=self.words, name="scores")
        return Graph.from_json(mx.sym.SoftmaxOutput(x, normalization="batch", name="softmax").tojson())

    def initial_values(self, seed: int) -> dict[str, np.ndarray]:
        """Initial parameters, fp32: the embedding normal with standard deviation 0.1; recurrent layers uniform within 1
        / sqrt(hidden), as in PyTorch; the bias 0. Each array depends only on the seed and the array's name.
        """
        shapes = self.graph.infer_shapes(self.shapes)
        values = {}
        for name in (name for name in self.graph.arguments if name not in self.shapes):
            rng, shape = np.random.default_rng([seed, zlib.crc32(name.encode())]), shapes[Ref(name)]
            if name == "embedding_weight":
                values[name] = EMBEDDING_DEVIATION * rng.standard_normal(shape, np.float32)
            elif name == "rnn_parameters":
                values[name] = rng.uniform(-1, 1, shape).astype(np.float32) / np.float32(math.sqrt(self.hidden))
            else:
                values[name] = np.zeros(shape, np.float32)
        return values

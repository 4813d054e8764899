"""BatchNorms folded into the preceding convolutions on the GPU, for inference and for frozen layers in training."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from graph_passes.executors.cuda.kernel_library import count, instance
from graph_passes.executors.cuda.parameters import FoldedStore, ParameterStore, parameters_of
from graph_passes.executors.cuda.toolchain import Toolchain
from graph_passes.graph import Graph, Ref
from graph_passes.passes import fold_bn, fold_frozen, foldings


class Folded:
    """All parameters of `fold_bn(graph)`. With `frozen_only`, only the parameters that `fold_frozen(graph)` replaces:
    folded weights and their biases. `fold` computes the values.
    """

    def __init__(self, graph: Graph, shapes: Mapping[str, tuple[int, ...]], dtype: str, tools: Toolchain,
                 frozen_only: bool = False) -> None:
        self._gpu, self._kernels, self._kernel = tools.gpu, tools.kernels, instance("fold_batch_norm", dtype)
        self._foldings = list(foldings(graph, frozen_only))
        folded = fold_frozen(graph) if frozen_only else fold_bn(graph)
        inferred = folded.infer_shapes(shapes)
        parameters = parameters_of(folded, inferred, tuple(shapes))
        statistics = {name: inferred[Ref(name)] for name in folded.aux}
        if frozen_only:
            own = {name for each in self._foldings for name in (each.convolution.inputs[1].node, each.bias)}
            parameters, statistics = [parameter for parameter in parameters if parameter.name in own], {}
        self.store = FoldedStore(parameters, statistics, dtype)
        for array in self.store.arrays.values():
            array.place(self._gpu.allocate(max(array.num_bytes, 1)))
            self._gpu.fill(array.address, 0, array.num_bytes)  # clears the padding behind statistics
        self._graph: Any = None  # CUDA graph of the folding kernels

    def fold(self, trained: ParameterStore) -> None:
        """Compute the folded parameters from the present parameters and running statistics. Asynchronous."""
        if self._graph is None:
            self._kernels.get("elementwise.cu", self._kernel)  # the kernel must be compiled before the capture
            self._graph = self._gpu.capture(partial(self._enqueue, trained))
        self._gpu.replay(self._graph)

    def _enqueue(self, trained: ParameterStore) -> None:
        own, kernel = self.store.values, self._kernels.get("elementwise.cu", self._kernel)
        left = dict.fromkeys(own)
        for norm, convolution, bias in self._foldings:
            gamma, beta, mean, var = (ref.node for ref in norm.inputs[1:5])
            weight = convolution.inputs[1].node
            source = trained.master.slices[weight]
            filters = source.shape[0]
            own_bias = trained.master.slices.get(bias)  # the convolution's own bias, if it has one
            kernel.launch((filters, 1, 1), (256, 1, 1), source.address, own_bias.address if own_bias else 0,
                          trained.master.slices[gamma].address, trained.master.slices[beta].address,
                          trained.statistics.slices[mean].address, trained.statistics.slices[var].address,
                          own[weight].address, own[bias].address,
                          ctypes.c_float(norm["eps"]), count(math.prod(source.shape[1:])))
            del left[weight], left[bias]
        for name in left:
            self._gpu.copy(own[name].address, trained.value(name).address, own[name].num_bytes)
        for name, buffer in self.store.statistics.slices.items():
            self._gpu.copy(buffer.address, trained.statistics.slices[name].address, buffer.num_bytes)

"""Names of weights in other libraries. A family's file maps layer names (`PUBLISHED`); this file maps the names of a
layer's arrays."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

# TORCH: torchvision and timm have the network, with equal names of weights.
TORCH, TORCHVISION, TIMM, GLUON = "torchvision or timm", "torchvision", "timm", "Gluon"

# Suffix of our name -> the array's name within a layer of the other library.
_TORCH_ENDS = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias", "moving_mean": "running_mean",
               "moving_var": "running_var", "running_mean": "running_mean", "running_var": "running_var"}
_GLUON_ENDS = {"weight": "weight", "bias": "bias", "gamma": "gamma", "beta": "beta", "moving_mean": "running_mean",
               "moving_var": "running_var", "running_mean": "running_mean", "running_var": "running_var"}
_OUR_END = re.compile(f"_({'|'.join(_TORCH_ENDS)})$")
# our kinds of layers -> Gluon's kinds in numbered names such as conv0
_KINDS = {"conv": "conv", "bn": "batchnorm", "classifier": "dense"}


@dataclass(frozen=True)
class Published:
    """A network in another library: the names of its layers, and how its images are prepared.

    `layers` maps our layer names to the library's names, in the order in which the library creates the layers. An array
    that has its own name in the library is listed by its whole name. `norm_of_images`: the library's layer, if any,
    that normalises the images once more before the first convolution. `model`: the library's name of the network, if it
    differs from ours. `images`: settings of `weights.record.Record` for files without a record, if the settings differ
    from torchvision's first recipe. `num_axes`: our arrays that have another number of axes in the library, without
    axes of size 1: a 1x1 convolution may be a fully connected layer there. `is_reversed`: the library's kernels have
    their rows and columns in the reverse order.
    """

    library: str  # TORCH, TORCHVISION, TIMM, GLUON, or another program
    layers: Mapping[str, str]
    norm_of_images: str = ""
    model: str = ""
    images: Mapping[str, Any] = field(default_factory=dict)
    num_axes: Mapping[str, int] = field(default_factory=dict)
    is_reversed: bool = False

    def name(self, ours: str) -> str:
        """The library's name of our array `ours`, such as layer1.0.bn1.weight for stage1_block1_bn1_gamma."""
        if ours in self.layers:
            return self.layers[ours]
        found = _OUR_END.search(ours)
        assert found, ours
        ends = _GLUON_ENDS if self.library == GLUON else _TORCH_ENDS
        return f"{self.layers[ours[: found.start()]]}.{ends[found[1]]}"

    def shape(self, ours: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in the library of our array `ours`, which has the canonical shape `shape`."""
        shape = (shape[0], shape[3], *shape[1:3]) if len(shape) == 4 else shape
        num_axes = self.num_axes.get(ours, len(shape))
        assert set(shape[num_axes:]) <= {1}, ours
        return (*shape, *[1] * (num_axes - len(shape)))[:num_axes]

    def theirs(self, ours: str, array: np.ndarray) -> np.ndarray:
        """Our canonical array `ours` in the library's form."""
        shape = self.shape(ours, array.shape)
        if array.ndim == 4:
            array = self._turned(array).transpose(0, 3, 1, 2)
        return np.ascontiguousarray(array).reshape(shape)

    def ours(self, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """The inverse of `theirs`. `shape`: our canonical shape, whose first size may differ from the array's."""
        if len(shape) == 4:
            return self._turned(array.reshape(len(array), shape[3], *shape[1:3]).transpose(0, 2, 3, 1))
        return array.reshape(len(array), *shape[1:])

    def _turned(self, weight: np.ndarray) -> np.ndarray:
        """Convert a kernel (filters, rows, columns, channels) from our order of rows and columns to the library's
        order, or back.
        """
        # copied, because a reversed view of a 1x1 kernel has negative strides, but counts as contiguous
        return weight[:, ::-1, ::-1].copy() if self.is_reversed else weight

    @cached_property
    def layer_names(self) -> tuple[frozenset[str], ...]:
        """The names of all layers in each form of a file: our names, the library's names, and Gluon's numbered names.
        """
        counted = self.counted() if self.library == GLUON else ()
        return frozenset(self.layers), frozenset(self.layers.values()), frozenset(counted)

    def counted(self) -> dict[str, str]:
        """Gluon's alternative layer names, numbered by kind within a stage: stage1_conv0."""
        layers = {"images_bn": self.norm_of_images, **self.layers} if self.norm_of_images else self.layers
        counts: Counter[str] = Counter()
        names = {}
        for ours, theirs in layers.items():
            stage = re.match(r"stage\d+_", ours)
            own_kind = re.sub(r"\d+$", "", ours.rpartition("_")[2])
            kind = (stage[0] if stage else "") + _KINDS.get(own_kind, own_kind)
            names[f"{kind}{counts[kind]}"] = theirs
            counts[kind] += 1
        return names

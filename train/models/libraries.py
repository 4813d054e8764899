"""Names of weights in other libraries. A family's file maps layer names (`PUBLISHED`); this file maps the names of a
layer's arrays."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

TORCH, GLUON = "torchvision or timm", "Gluon"

# End of our name -> the array's name within a layer of the other library.
_TORCH_ENDS = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias", "moving_mean": "running_mean",
               "moving_var": "running_var", "running_mean": "running_mean", "running_var": "running_var"}
_GLUON_ENDS = {"weight": "weight", "bias": "bias", "gamma": "gamma", "beta": "beta", "moving_mean": "running_mean",
               "moving_var": "running_var", "running_mean": "running_mean", "running_var": "running_var"}
_OUR_END = re.compile(f"_({'|'.join(_TORCH_ENDS)})$")
# our kinds of layers -> Gluon's, where they differ, in numbered names such as conv0
_KINDS = {"conv": "conv", "bn": "batchnorm", "classifier": "dense"}


@dataclass(frozen=True)
class Published:
    """The layer names of a network in another library.

    `layers` maps our layer names to the library's, in the order in which the library creates them. `norm_of_images`:
    the library's layer, if any, that normalises the images once more before the first convolution.
    """

    library: str  # TORCH or GLUON
    layers: Mapping[str, str]
    norm_of_images: str = ""

    def name(self, ours: str) -> str:
        """The library's name of our array `ours`, such as layer1.0.bn1.weight for stage1_block1_bn1_gamma."""
        found = _OUR_END.search(ours)
        assert found, ours
        ends = _TORCH_ENDS if self.library == TORCH else _GLUON_ENDS
        return f"{self.layers[ours[: found.start()]]}.{ends[found[1]]}"

    @cached_property
    def all_layers(self) -> frozenset[str]:
        """The names of the network's layers, ours and the library's."""
        return frozenset((*self.layers, *self.layers.values(), *(self.counted() if self.library == GLUON else ())))

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

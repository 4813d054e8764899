"""Names under which other libraries publish the weights of our networks: a family's file says what its layers are
called there (`PUBLISHED`), and this one what the arrays of a layer are called."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

TORCH, GLUON = "torchvision or timm", "Gluon"

# Ends of our names, and what the array is called in a layer of the other library.
_TORCH_ENDS = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias", "moving_mean": "running_mean",
               "moving_var": "running_var"}
_GLUON_ENDS = {"weight": "weight", "bias": "bias", "gamma": "gamma", "beta": "beta", "moving_mean": "running_mean",
               "moving_var": "running_var"}
_OUR_END = re.compile(f"_({'|'.join(_TORCH_ENDS)})$")
_KINDS = {"conv": "conv", "bn": "batchnorm", "classifier": "dense"}  # in names by which Gluon counts layers


@dataclass(frozen=True)
class Published:
    """What a network's layers are called in another library.

    `layers` has the name there of each of our layers, in the order in which the network there makes them. `refused`:
    why a network with these names, though all its arrays fit, computes something else than ours. `norm_of_images`: the
    layer there, if it has one, that normalises the images once more before the first convolution.
    """

    library: str  # TORCH or GLUON
    layers: Mapping[str, str]
    refused: str = ""
    norm_of_images: str = ""

    def name(self, ours: str) -> str:
        """The other library's name of our array `ours`, such as layer1.0.bn1.weight for stage1_block1_bn1_gamma."""
        found = _OUR_END.search(ours)
        assert found, ours
        ends = _TORCH_ENDS if self.library == TORCH else _GLUON_ENDS
        return f"{self.layers[ours[: found.start()]]}.{ends[found[1]]}"

    def counted(self) -> dict[str, str]:
        """Gluon's other names of the layers, which it counts by their kinds within a stage: stage1_conv0."""
        layers = {"images_bn": self.norm_of_images, **self.layers} if self.norm_of_images else self.layers
        counts: Counter[str] = Counter()
        names = {}
        for ours, theirs in layers.items():
            stage = re.match(r"stage\d+_", ours)
            kind = (stage[0] if stage else "") + _KINDS[re.sub(r"\d+$", "", ours.rpartition("_")[2])]
            names[f"{kind}{counts[kind]}"] = theirs
            counts[kind] += 1
        return names

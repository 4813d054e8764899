"""ConvNeXt: 7x7 depthwise convolutions, LayerNorm and GELU.

Liu et al., 'A ConvNet for the 2020s' (arXiv:2201.03545), figure 4 and appendix A.1; as in torchvision and timm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from common.mxnet_compat import mx
from train.models.blocks import Symbol, activation, classify, conv, layer_norm, layer_scale, mean_of_pixels
from train.models.libraries import TIMM, TORCHVISION, Published

# Name -> (channels of the first stage, which each further stage doubles; blocks of each stage; the shorter side, in
# pixels, to which torchvision resizes images).
SIZES = {"convnext_tiny": (96, (3, 3, 9, 3), 236), "convnext_small": (96, (3, 3, 27, 3), 230),
         "convnext_base": (128, (3, 3, 27, 3), 232)}
EPS = 1e-6  # epsilon of each LayerNorm
LAYER_SCALE = 1e-6  # initial factor of each branch
DEVIATION = 0.02  # standard deviation of initial weights (the paper also cuts off at 2, which is 100 deviations)


def convnext(name: str, num_classes: int = 1000, label_smoothing: float = 0.0) -> Symbol:
    """The training Symbol, with the inputs and the output of `Network`."""
    x = _conv(mx.sym.Variable("data"), "stem_conv", SIZES[name][0], 4, stride=4, pad=0)
    x = layer_norm(x, "stem_norm", EPS)
    for stage, number, width in blocks(name):
        if number == 1 and stage > 1:
            x = layer_norm(x, f"stage{stage}_norm", EPS)
            x = _conv(x, f"stage{stage}_conv", width, 2, stride=2, pad=0)
        x = _block(x, f"stage{stage}_block{number}", width)
    x = layer_norm(mean_of_pixels(x, "pool"), "last_norm", EPS)
    return classify(mx.sym.Flatten(x, name="flatten"), num_classes, label_smoothing, DEVIATION)


def blocks(name: str) -> Iterator[tuple[int, int, int]]:
    """(stage, number within the stage, both from 1, channels) of each block."""
    width, num_blocks, _ = SIZES[name]
    for stage, in_stage in enumerate(num_blocks, start=1):
        for number in range(1, in_stage + 1):
            yield stage, number, width * 2 ** (stage - 1)


def _block(x: Symbol, name: str, width: int) -> Symbol:
    y = layer_norm(_conv(x, f"{name}_conv1", width, 7, groups=width), f"{name}_norm", EPS)
    y = activation(_conv(y, f"{name}_conv2", 4 * width, 1), f"{name}_act", "gelu")
    y = layer_scale(_conv(y, f"{name}_conv3", width, 1), f"{name}_scale", width, LAYER_SCALE)
    return mx.sym.elemwise_add(y, x, name=f"{name}_add")


def _conv(x: Symbol, name: str, filters: int, kernel: int, **settings: Any) -> Symbol:
    return conv(x, name, filters, kernel, bias=True, deviation=DEVIATION, **settings)




_LAYERS = ("scale_gamma", "conv1", "norm", "conv2", "conv3")  # layers of a block


def _torchvision(name: str) -> Published:
    names = {"stem_conv": "features.0.0", "stem_norm": "features.0.1"}
    layers = ("layer_scale", "block.0", "block.2", "block.3", "block.5")
    for stage, number, _ in blocks(name):
        names |= _block_names(stage, number, f"features.{2 * stage - 2}", f"features.{2 * stage - 1}.{number - 1}",
                              layers)
    names |= {"last_norm": "classifier.0", "classifier": "classifier.2"}
    return Published(TORCHVISION, names, images={"size": 224, "crop": 224 / SIZES[name][2]},
                     num_axes=_num_axes(name, conv2_weight=2, conv3_weight=2, scale_gamma=3))


def _timm(name: str) -> Published:
    names = {"stem_conv": "stem.0", "stem_norm": "stem.1"}
    layers = ("gamma", "conv_dw", "norm", "mlp.fc1", "mlp.fc2")
    for stage, number, _ in blocks(name):
        place = f"stages.{stage - 1}"
        names |= _block_names(stage, number, f"{place}.downsample", f"{place}.blocks.{number - 1}", layers)
    names |= {"last_norm": "head.norm", "classifier": "head.fc"}
    return Published(TIMM, names, num_axes=_num_axes(name, conv2_weight=2, conv3_weight=2))


def _block_names(stage: int, number: int, before: str, theirs: str, layers: Sequence[str]) -> dict[str, str]:
    """The layer names of a block: our names -> names in another library, in which the block is called `theirs`. A
    stage's first block also has the layers `before` it, which halve the size of the images.
    """
    halving = {f"stage{stage}_norm": f"{before}.0", f"stage{stage}_conv": f"{before}.1"}
    own = {f"stage{stage}_block{number}_{ours}": f"{theirs}.{layer}"
           for ours, layer in zip(_LAYERS, layers, strict=True)}
    return halving | own if number == 1 and stage > 1 else own


def _num_axes(name: str, **of_arrays: int) -> dict[str, int]:
    """`Published.num_axes` from the number of axes that these arrays of every block have in the other library."""
    return {f"stage{stage}_block{number}_{array}": count for stage, number, _ in blocks(name)
            for array, count in of_arrays.items()}


MODELS = {name: partial(convnext, name) for name in SIZES}
PUBLISHED = {name: (_torchvision(name), _timm(name)) for name in SIZES}

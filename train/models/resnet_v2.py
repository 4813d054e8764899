"""Pre-activation ResNet: BatchNorm and ReLU come before each convolution, and nothing follows the sum of a block.

He et al., 'Identity Mappings in Deep Residual Networks' (arXiv:1603.05027), with the stride of a bottleneck in its 3x3
convolution. The networks are Gluon's, but without Gluon's BatchNorm of the images, because the loader normalises
images. Branches do not end in a BatchNorm, so there is no gamma that could start at 0.
"""

from __future__ import annotations

from functools import partial

from common.mxnet_compat import mx
from train.models.blocks import Symbol, batch_norm, conv, head, max_pool, relu
from train.models.libraries import GLUON, Published
from train.models.resnet import BLOCKS_PER_STAGE, Block, blocks, numbered_blocks, stem


def resnet_v2(depth: int, num_classes: int = 1000, label_smoothing: float = 0.0) -> Symbol:
    """The training Symbol, with the inputs and the output of `Network`. `depth`: 18, 34, 50, 101 or 152."""
    x = max_pool(stem(mx.sym.Variable("data")), "stem_pool")
    for block in blocks(depth):
        x = _block(x, block)
    return head(relu(batch_norm(x, "last_bn"), "last_relu"), num_classes, label_smoothing)


def _block(x: Symbol, block: Block) -> Symbol:
    """A block. Its projection, like its branch, reads the input after the first BatchNorm and ReLU."""
    name, shortcut = block.name, x
    for number, layer in enumerate(block.branch, start=1):
        x = relu(batch_norm(x, f"{name}_bn{number}"), f"{name}_relu{number}")
        if number == 1 and block.projects:
            shortcut = conv(x, f"{name}_shortcut_conv", block.filters, kernel=1, stride=block.stride)
        x = conv(x, f"{name}_conv{number}", *layer)
    return mx.sym.elemwise_add(x, shortcut, name=f"{name}_add")


def gluon_names(depth: int) -> Published:
    """The layer names in Gluon's resnet18_v2 and so on."""
    names = {"stem_conv": "features.1", "stem_bn": "features.2"}
    for stage, number, block in numbered_blocks(depth):
        theirs = f"features.{stage + 4}.{number}"
        for layer in range(1, len(block.branch) + 1):
            names |= {f"{block.name}_{kind}{layer}": f"{theirs}.{kind}{layer}" for kind in ("bn", "conv")}
        if block.projects:
            names[f"{block.name}_shortcut_conv"] = f"{theirs}.downsample"
    return Published(GLUON, names | {"last_bn": "features.9", "classifier": "output"}, norm_of_images="features.0")


MODELS = {f"resnet{depth}_v2": partial(resnet_v2, depth) for depth in BLOCKS_PER_STAGE}
PUBLISHED = {f"resnet{depth}_v2": (gluon_names(depth),) for depth in BLOCKS_PER_STAGE}

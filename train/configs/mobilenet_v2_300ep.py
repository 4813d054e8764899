"""MobileNetV2 on ImageNet in 300 epochs at 224 pixels: torchvision's recipe of its first weights.

    scripts/dgx1_8gpu.sh -n 8 --config mobilenet_v2_300ep --data /path/to/imagenet
    python -m train --config mobilenet_v2_300ep --data /path/to/imagenet --batch-size 256   # one GPU, the same batch

SGD, learning rate 0.045 for 256 images, times 0.98 after each epoch, weight decay 4e-5, dropout 0.2; crops and mirror
images alone. Source: https://github.com/pytorch/vision/tree/main/references/classification#mobilenetv2, for which
torchvision states 71.878 % top-1. What differs: docs/recipes.md.

Hardware: 8 NVIDIA GPUs, or 1. Images/sec: not measured here. Accuracy: 71.88 % expected, not measured here.
"""

from train.config import Config

EPOCHS = 300

CONFIG = Config(
    model="mobilenet_v2",
    zero_init_residual=False,
    label_smoothing=0.0,
    data="data/imagenet",
    image_size=224,
    batch_size=32,
    random_area=(0.08, 1.0),
    epochs=EPOCHS,
    learning_rate=0.045,
    schedule="step",
    decay_epochs=tuple(float(epoch) for epoch in range(1, EPOCHS)),
    decay_factor=0.98,
    warmup_epochs=0.0,
    momentum=0.9,
    weight_decay=4e-5,
    dropout=0.2,
)

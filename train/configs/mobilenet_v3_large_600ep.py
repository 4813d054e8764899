"""MobileNetV3-Large on ImageNet in 600 epochs at 224 pixels: torchvision's recipe of its first weights.

    scripts/dgx1_8gpu.sh -n 8 --config mobilenet_v3_large_600ep --data /path/to/imagenet
    python -m train --config mobilenet_v3_large_600ep --data /path/to/imagenet --accumulate 8    # one GPU, equal batch

RMSProp, learning rate 0.064 for 1,024 images, times 0.973 after every second epoch, weight decay 1e-5, dropout 0.2;
AutoAugment and random erasing 0.2. PyTorch's epsilon of 0.0316 outside the root is 1e-3 inside it here. Source:
https://github.com/pytorch/vision/tree/main/references/classification#mobilenetv3-large--small and its pull requests
3182 and 3354; torchvision states 74.042 % top-1. What differs: docs/recipes.md.

Hardware: 8 NVIDIA GPUs, or 1. Images/sec: not measured here. Accuracy: 74.04 % expected, not measured here.
"""

from train.config import Config
from train.options.optimizer import REFERENCE_BATCH

EPOCHS = 600
GLOBAL_BATCH = 1024  # images

CONFIG = Config(
    model="mobilenet_v3_large",
    zero_init_residual=False,
    label_smoothing=0.0,
    data="data/imagenet",
    image_size=224,
    batch_size=128,
    random_area=(0.08, 1.0),
    auto_augment="autoaugment",
    random_erasing=0.2,
    epochs=EPOCHS,
    optimizer="rmsprop",
    learning_rate=0.064 * REFERENCE_BATCH / GLOBAL_BATCH,
    schedule="step",
    decay_epochs=tuple(float(epoch) for epoch in range(2, EPOCHS, 2)),
    decay_factor=0.973,
    warmup_epochs=0.0,
    momentum=0.9,
    rho=0.9,
    epsilon=1e-3,
    weight_decay=1e-5,
    dropout=0.2,
)

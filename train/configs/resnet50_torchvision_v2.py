"""ResNet-50 on ImageNet in 600 epochs at 176 pixels, validation at 224: torchvision's recipe of its second weights.

    scripts/dgx1_8gpu.sh -n 8 --config resnet50_torchvision_v2 --data /path/to/imagenet
    python -m train --config resnet50_torchvision_v2 --data /path/to/imagenet --accumulate 8   # one GPU, the same batch

SGD, learning rate 0.5 for 1,024 images, cosine after 5 epochs of warm-up, weight decay 2e-5; TrivialAugment, random
erasing, mixup and CutMix, label smoothing, repeated augmentation, a moving average of the weights. Source:
https://github.com/pytorch/vision/issues/3995#issuecomment-1013906621, the recipe of ResNet50_Weights.IMAGENET1K_V2, for
which torchvision states 80.858 % top-1. Differences: docs/recipes.md.

Hardware: 8 NVIDIA GPUs, or 1. Images/sec: docs/recipes.md. Accuracy: 80.86 % expected, not measured here.
"""

from train.config import Config
from train.options.optimizer import REFERENCE_BATCH

GLOBAL_BATCH = 1024  # images
EPOCHS = 600
# torchvision updates the average every 32 steps; its train.py computes the decay from --model-ema-decay 0.99998, the
# global batch and the epochs. Here the average is updated in every step, with the 32nd root of torchvision's decay.
EMA_STEPS = 32
EMA_DECAY = 1 - (1 - 0.99998) * GLOBAL_BATCH * EMA_STEPS / EPOCHS

CONFIG = Config(
    model="resnet50",
    zero_init_residual=False,
    label_smoothing=0.1,
    data="data/imagenet",
    image_size=176,
    val_image_size=224,
    val_crop_fraction=224 / 232,
    batch_size=128,
    random_area=(0.08, 1.0),
    auto_augment="trivialaugment",
    random_erasing=0.1,
    mixup=0.2,
    cutmix=1.0,
    repeated_augmentation=4,
    epochs=EPOCHS,
    learning_rate=0.5 * REFERENCE_BATCH / GLOBAL_BATCH,
    schedule="cosine",
    warmup_epochs=5.0,
    momentum=0.9,
    weight_decay=2e-5,
    ema_decay=EMA_DECAY ** (1 / EMA_STEPS),
)

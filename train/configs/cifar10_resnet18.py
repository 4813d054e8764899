"""ResNet-18 on CIFAR-10, upscaled to 128 pixels: the stem then works on one value for each pixel of the original.

    python -m train --config cifar10_resnet18 --data /path/to/cifar10

The data may be RecordIO, folders, or CIFAR-10's own files. The goal on these files is 94 % (DAWNBench's target): not
measured here.

Hardware: one NVIDIA H200, 16 CPU cores. Images/sec: 85,700. Accuracy: 91.3 % in one run, 30 s of training and
validation; with --epochs 18, 89.0 % (88.7 to 89.4 %, 3 seeds) in 12 s, as PyTorch reaches with this recipe
(docs/recipes.md). The images were those re-encoded at JPEG quality 75 with colour at half resolution.
"""

from train.config import Config

CONFIG = Config(
    model="resnet18",
    label_smoothing=0.1,
    data="data/cifar10",
    image_size=128,
    val_crop_fraction=1.0,
    batch_size=512,
    crop_padding=4,
    cutout=10 / 32,
    epochs=40,
    learning_rate=0.2,
    warmup_epochs=3.0,
    momentum=0.9,
    nesterov=True,
    weight_decay=5e-4,
    ema_decay=0.99,
    zero_init_residual=False,  # residual blocks that start as identities begin to learn late
    validate_every=2,
)

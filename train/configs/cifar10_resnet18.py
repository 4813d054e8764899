"""ResNet-18 on CIFAR-10, upscaled to 128 pixels: the stem then works on one value for each pixel of the original.

    python -m train --config cifar10_resnet18 --data /path/to/cifar10

The data may be RecordIO, folders, or CIFAR-10's own files, on which 94 % (DAWNBench's target) is the aim: not measured
here.

Hardware: one NVIDIA H200, 16 CPU cores. Images/sec: 24,400 to 28,600, the loader being the likely limit. Accuracy: 87.8
and 87.7 % in two runs of 18 epochs, 40 s each; 36 epochs were not run. The images were those re-encoded at JPEG quality
75 with halved colour. A first measurement, with blocks that began as their shortcuts, and on code of which kernels have
since been taken out (docs/recipes.md).
"""

from train.config import Config

CONFIG = Config(
    depth=18,
    label_smoothing=0.1,
    data="data/cifar10",
    image_size=128,
    val_image_size=160,
    val_crop_fraction=1.0,
    batch_size=256,
    random_area=(0.4, 1.0),
    epochs=36,
    learning_rate=0.2,
    warmup_epochs=3.0,
    momentum=0.9,
    nesterov=True,
    weight_decay=5e-4,
    zero_init_residual=False,  # blocks that begin as their shortcuts learn late: docs/recipes.md
    validate_every=2,
)

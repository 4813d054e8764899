"""ResNet-50 on ImageNet in 88 epochs with progressive resizing: 160 pixels growing to 192, validation at 256.

    scripts/dgx1_8gpu.sh -n 8 --config resnet50_ffcv_88ep --data /path/to/imagenet
    python -m train --config resnet50_ffcv_88ep --data /path/to/imagenet                # one GPU

Source: libffcv/ffcv-imagenet, rn50_configs/rn50_88_epochs.yaml (learning rate 1.7 for 4,096 images, linear to 0 after 2
epochs of warm-up), which states 78.4 % top-1. It has two things that are missing here: blurred pooling, and averaging
over an image and its mirror image in validation.

Hardware: 1 to 8 NVIDIA GPUs. Images/sec: docs/recipes.md. Accuracy: up to 78.4 % expected, not measured here.
"""

from train.config import Config
from train.options.optimizer import REFERENCE_BATCH

CONFIG = Config(
    model="resnet50",
    zero_init_residual=False,
    label_smoothing=0.1,
    data="data/imagenet",
    image_size=192,
    first_image_size=160,
    resize_epochs=(65.0, 76.0),
    val_image_size=256,
    batch_size=512,
    random_area=(0.08, 1.0),
    epochs=88,
    learning_rate=1.7 * REFERENCE_BATCH / 4096,
    schedule="polynomial",
    decay_power=1.0,
    warmup_epochs=2.0,
    momentum=0.9,
    weight_decay=1e-4,
)

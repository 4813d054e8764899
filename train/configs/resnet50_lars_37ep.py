"""ResNet-50 on ImageNet in 37 epochs with LARS and a global batch of 3,200 images: MLPerf's recipe.

    scripts/dgx1_8gpu.sh -n 8 --config resnet50_lars_37ep --data /path/to/imagenet
    python -m train --config resnet50_lars_37ep --data /path/to/imagenet --accumulate 8     # one GPU, the same batch

Learning rate 11 after 2 epochs of warm-up, then along a parabola to 1e-4, momentum 0.9, weight decay 5e-5, label
smoothing 0.1, trust coefficient 0.001; BatchNorm's parameters and biases with neither weight decay nor LARS. Source:
the training rules and reference convergence points of MLPerf (mlcommons/training_policies, mlcommons/logging), whose
target is 75.9 %. The learning rate scales linearly with other global batches.

Hardware: 8 NVIDIA GPUs, or 1. Images/sec: docs/recipes.md. Accuracy: 75.9 % expected, not measured here.
"""

from train.config import Config
from train.options.optimizer import REFERENCE_BATCH

GLOBAL_BATCH = 3200  # images

CONFIG = Config(
    model="resnet50",
    label_smoothing=0.1,
    data="data/imagenet",
    image_size=224,
    batch_size=400,
    random_area=(0.05, 1.0),
    epochs=37,
    optimizer="lars",
    learning_rate=11.0 * REFERENCE_BATCH / GLOBAL_BATCH,
    schedule="polynomial",
    decay_power=2.0,
    final_learning_rate=1e-4 * REFERENCE_BATCH / GLOBAL_BATCH,
    warmup_epochs=2.0,
    momentum=0.9,
    weight_decay=5e-5,
)

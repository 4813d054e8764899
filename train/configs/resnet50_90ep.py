"""ResNet-50 on ImageNet in 90 epochs, the recipe of NVIDIA's MXNet example.

    make train-1gpu DATA=/path/to/imagenet                                                    # one GPU
    scripts/dgx1_8gpu.sh -n 8 -b 256 -e 90 --config resnet50_90ep --data /path/to/imagenet

SGD with momentum 0.875, weight decay 1/32768, label smoothing 0.1, learning rate 0.256 per 256 images with 5 epochs of
linear warm-up, then cosine to 0. Source: NVIDIA DeepLearningExamples, MxNet/Classification/RN50v1.5, which states
77.15 % top-1 in mixed precision over 8 seeds, 76.97 to 77.27 %.

Hardware: 1 to 8 NVIDIA GPUs. Images/sec: docs/recipes.md. Accuracy: 77.15 % expected, not measured here.
"""

from train.config import Config

CONFIG = Config(
    model="resnet50",
    label_smoothing=0.1,
    data="data/imagenet",
    image_size=224,
    batch_size=256,
    random_area=(0.08, 1.0),
    epochs=90,
    learning_rate=0.256,
    schedule="cosine",
    warmup_epochs=5.0,
    momentum=0.875,
    weight_decay=1 / 32768,
)

"""ResNet-50 on the built-in sample set at 48 pixels: what `make train-1gpu` runs on a machine without a GPU.

    python -m train --config cpu_sample

Hardware: two CPU cores. Images/sec: 97. Accuracy: 87 % validation top-1 of 12 classes after 3 min 21 s, validation and
checkpoints included (one run, benchmarks/results/cpu_sample.jsonl).
"""

from train.config import Config

CONFIG = Config(
    model="resnet50",
    label_smoothing=0.0,
    data="samples",
    image_size=48,
    batch_size=32,
    random_area=(0.5, 1.0),  # at 48 pixels a crop of 8 % of an image holds little of its class
    epochs=10,
    learning_rate=0.16,
    warmup_epochs=2.0,
    momentum=0.9,
    weight_decay=1e-4,
)

"""ResNet-50 on the built-in sample set at 32 pixels: what `make train-1gpu` runs without data of your own.

    python -m train --config cpu_sample

On a CPU it trains as many epochs as take 75 seconds, from 3 to the 10 that stand here (train/demonstration.py).

Hardware: two CPU cores. Images/sec: 101. Accuracy: 86.7 % validation top-1 of 12 classes after 5 epochs and 1 min 34 s,
validation and checkpoints included (one run, benchmarks/results/cpu_sample.jsonl); 70 % after 3 epochs.
"""

from train.config import Config

CONFIG = Config(
    model="resnet50",
    label_smoothing=0.0,
    data="samples",
    image_size=32,
    batch_size=32,
    random_area=(0.9, 1.0),  # at 32 pixels a small crop shows little of the object
    epochs=10,
    optimizer="adamw",  # SGD would need more steps than this run has
    learning_rate=0.008,
    betas=(0.9, 0.99),
    weight_decay=0.0,
    warmup_epochs=0.3,
    validate_every=2,
)

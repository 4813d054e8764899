"""ResNet-50 from trained weights, fine-tuned on an own folder of images: few epochs, a low learning rate.

    python -m train --config finetune --weights resnet50.pth --data /path/to/folder

`--weights` also determines the network if --model is not given. For a few hundred images add `--freeze backbone`, or
`--backbone-lr-factor 0.1`. The run stops after ten validations without improvement.

Hardware: any. Images/sec: not measured here; as in training, and more with frozen layers. Accuracy: not measured here;
docs/fine_tuning.md has runs on CIFAR-10.
"""

from train.config import Config

CONFIG = Config(
    model="resnet50",
    label_smoothing=0.1,
    data="data/images",
    batch_size=64,
    random_area=(0.35, 1.0),  # milder crops than in training from scratch (0.08), because the learning rate is low
    epochs=20,
    learning_rate=0.04,
    warmup_epochs=1.0,
    momentum=0.9,
    weight_decay=1e-4,
    ema_decay=0.99,
    patience=10,
)

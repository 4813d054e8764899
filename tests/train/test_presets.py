"""The presets of published recipes, field by field against their sources."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from train import checkpoint
from train.config import Config
from train.options.optimizer import REFERENCE_BATCH
from train.presets import load_preset

NUM_GPUS = 8  # of every source's command

STRIKES_BACK = "https://arxiv.org/abs/2110.00476"  # table 2, and the text
# Besides the table, the defaults of the authors' program.
TIMM = "https://github.com/huggingface/pytorch-image-models/blob/v1.0.31/timm"
TIMM_WEIGHTS = f"{TIMM}/models/resnet.py"  # resnet50.a1_in1k, a2_in1k and a3_in1k, with their _rcfg and _r3cfg
TIMM_LAMB = f"{TIMM}/optim/lamb.py"  # eps, max_grad_norm
TIMM_TRANSFORMS = f"{TIMM}/data/transforms_factory.py"  # scale, ratio and interpolation of create_transform
TIMM_RANDAUGMENT = f"{TIMM}/data/auto_augment.py"  # rand_augment_transform, 'rand-m7-mstd0.5-inc1'
TIMM_SAMPLER = f"{TIMM}/data/distributed_sampler.py"  # RepeatAugSampler: num_repeats
TIMM_MIXUP = f"{TIMM}/data/mixup.py"  # switch_prob
TORCHVISION = "https://github.com/pytorch/vision/issues/3995#issuecomment-1013906621"
TORCHVISION_TRAIN = "https://github.com/pytorch/vision/blob/main/references/classification/train.py"
TORCHVISION_WEIGHTS = "https://github.com/pytorch/vision/blob/v0.20.1/torchvision/models/resnet.py"
TORCHVISION_TRANSFORMS = "https://github.com/pytorch/vision/blob/v0.20.1/torchvision/transforms/transforms.py"
TORCHVISION_README = "https://github.com/pytorch/vision/tree/main/references/classification"
TORCHVISION_MODELS = "https://github.com/pytorch/vision/tree/main/torchvision/models"  # dropout, stochastic depth, crop
FFCV = "https://github.com/libffcv/ffcv-imagenet/blob/main/rn50_configs"
FFCV_TRAIN = "https://github.com/libffcv/ffcv-imagenet/blob/main/train_imagenet.py"

A2: dict[str, dict[str, Any]] = {
    STRIKES_BACK: {
        "model": "resnet50", "image_size": 224, "epochs": 300, "global batch": 2048, "optimizer": "lamb",
        "peak learning rate": 5e-3, "schedule": "cosine", "weight_decay": 0.02, "warmup_epochs": 5.0,
        "label_smoothing": 0.0, "mirror": True, "randaugment_magnitude": 7.0,
        "randaugment_magnitude_std": 0.5, "mixup": 0.1, "cutmix": 1.0, "random_erasing": 0.0, "cutout": 0.0,
        "ema_decay": 0.0, "val_crop_fraction": 0.95, "loss": "bce", "bce_threshold": 0.2, "stochastic_depth": 0.05,
        "dropout": 0.0,
    },
    TIMM_WEIGHTS: {"interpolation": "bicubic", "zero_init_residual": True},
    TIMM_LAMB: {"epsilon": 1e-6, "clip_norm": 1.0, "betas": (0.9, 0.999)},
    TIMM_TRANSFORMS: {"random_area": (0.08, 1.0), "random_ratio": (3 / 4, 4 / 3), "train_interpolation": "random"},
    TIMM_RANDAUGMENT: {"auto_augment": "randaugment-timm", "randaugment_operations": 2},
    TIMM_SAMPLER: {"repeated_augmentation": 3},
    TIMM_MIXUP: {"cutmix_share": 0.5},
}
FFCV_88: dict[str, dict[str, Any]] = {
    f"{FFCV}/rn50_88_epochs.yaml": {
        "model": "resnet50", "epochs": 88, "global batch": 4096, "peak learning rate": 1.7, "weight_decay": 1e-4,
        "label_smoothing": 0.1, "momentum": 0.9, "image_size": 192, "first_image_size": 160,
        "resize_epochs": (65.0, 76.0), "val_image_size": 256,
    },
    FFCV_TRAIN: {
        "optimizer": "sgd", "nesterov": False, "schedule": "polynomial", "decay_power": 1.0,  # "cyclic": linear to 0
        "final_learning_rate": 0.0, "warmup_epochs": 2.0, "random_area": (0.08, 1.0), "random_ratio": (3 / 4, 4 / 3),
        "mirror": True, "val_crop_fraction": 224 / 256, "zero_init_residual": False,
    },
}


def with_values(sources: dict[str, dict[str, Any]], **changed: Any) -> dict[str, dict[str, Any]]:
    """The same sources with other values; a field that no source has is added to the first source."""
    first = next(iter(sources))
    found = {url: values | {name: changed.pop(name) for name in values.keys() & changed}
             for url, values in sources.items()}
    found[first] |= changed
    return found


SOURCES: dict[str, dict[str, dict[str, Any]]] = {
    "resnet50_a1_600ep": with_values(A2, epochs=600, weight_decay=0.01, label_smoothing=0.1, mixup=0.2),
    "resnet50_a2_300ep": A2,
    "resnet50_a3_100ep": with_values(
        A2, epochs=100, image_size=160, val_image_size=224, repeated_augmentation=0, stochastic_depth=0.0,
        randaugment_magnitude=6.0, **{"peak learning rate": 8e-3}),
    "resnet50_torchvision_v2": {
        TORCHVISION: {
            "global batch": 1024, "epochs": 600, "optimizer": "sgd", "momentum": 0.9, "peak learning rate": 0.5,
            "schedule": "cosine", "warmup_epochs": 5.0, "weight_decay": 2e-5, "label_smoothing": 0.1, "mixup": 0.2,
            "cutmix": 1.0, "auto_augment": "trivialaugment", "random_erasing": 0.1, "repeated_augmentation": 4,
            "ema of 32 steps, of 0.99998": 0.9989077333333333, "interpolation": "bilinear", "image_size": 176,
            "train_interpolation": "same",
        },
        TORCHVISION_TRAIN: {"nesterov": False, "final_learning_rate": 0.0, "cutmix_share": 0.5, "clip_norm": 0.0,
                            "loss": "softmax"},
        TORCHVISION_WEIGHTS: {"model": "resnet50", "val_image_size": 224, "val_crop_fraction": 224 / 232,
                              "zero_init_residual": False},
        TORCHVISION_TRANSFORMS: {"random_area": (0.08, 1.0), "random_ratio": (3 / 4, 4 / 3), "mirror": True},
    },
    "regnet_y_400mf_100ep": {
        TORCHVISION_README: {
            "model": "regnet_y_400mf", "global batch": 1024, "epochs": 100, "optimizer": "sgd", "momentum": 0.9,
            "peak learning rate": 0.4, "schedule": "cosine", "warmup_epochs": 5.0, "weight_decay": 5e-5,
            "label_smoothing": 0.0, "image_size": 224,
        },
        TORCHVISION_MODELS: {"val_crop_fraction": 224 / 256, "zero_init_residual": False, "stochastic_depth": 0.0},
        TORCHVISION_TRANSFORMS: {"random_area": (0.08, 1.0), "random_ratio": (3 / 4, 4 / 3), "mirror": True},
    },
    "mobilenet_v2_300ep": {
        TORCHVISION_README: {
            "model": "mobilenet_v2", "global batch": 256, "epochs": 300, "optimizer": "sgd", "momentum": 0.9,
            "peak learning rate": 0.045, "schedule": "step", "decay_factor": 0.98, "warmup_epochs": 0.0,
            "decay_epochs": tuple(np.arange(1.0, 300.0)), "weight_decay": 4e-5, "label_smoothing": 0.0,
            "image_size": 224,
        },
        TORCHVISION_MODELS: {"val_crop_fraction": 224 / 256, "zero_init_residual": False, "dropout": 0.2},
        TORCHVISION_TRANSFORMS: {"random_area": (0.08, 1.0), "random_ratio": (3 / 4, 4 / 3), "mirror": True},
    },
    "mobilenet_v3_large_600ep": {
        TORCHVISION_README: {
            "model": "mobilenet_v3_large", "global batch": 1024, "epochs": 600, "optimizer": "rmsprop",
            "peak learning rate": 0.064, "schedule": "step", "decay_factor": 0.973, "warmup_epochs": 0.0,
            "decay_epochs": tuple(np.arange(2.0, 600.0, 2.0)), "weight_decay": 1e-5, "label_smoothing": 0.0,
            "image_size": 224, "auto_augment": "autoaugment", "random_erasing": 0.2,
        },
        # RMSprop(momentum=args.momentum, eps=0.0316, alpha=0.9); 0.0316 is the root of our epsilon
        TORCHVISION_TRAIN: {"momentum": 0.9, "rho": 0.9, "epsilon": 1e-3},
        TORCHVISION_MODELS: {"val_crop_fraction": 224 / 256, "zero_init_residual": False, "dropout": 0.2},
        TORCHVISION_TRANSFORMS: {"random_area": (0.08, 1.0), "random_ratio": (3 / 4, 4 / 3), "mirror": True},
    },
    "resnet50_ffcv_88ep": FFCV_88,
    "resnet50_ffcv_16ep": with_values(FFCV_88, epochs=16, resize_epochs=(11.0, 13.0)),
}
SOURCES |= {
    "efficientnet_v2_s_600ep": with_values(
        {**SOURCES["resnet50_torchvision_v2"], TORCHVISION_README: {}, TORCHVISION_MODELS: {"dropout": 0.2}},
        model="efficientnet_v2_s", image_size=300, val_image_size=384, val_crop_fraction=1.0, stochastic_depth=0.2),
    "convnext_tiny_600ep": with_values(
        {**SOURCES["resnet50_torchvision_v2"], TORCHVISION_README: {}, TORCHVISION_MODELS: {"stochastic_depth": 0.1}},
        model="convnext_tiny", optimizer="adamw", weight_decay=0.05, val_crop_fraction=224 / 236,
        **{"peak learning rate": 1e-3}),
}
OUR_OWN = {"config", "data", "batch_size", "learning_rate", "ema_decay"}  # the last two in the sources' own units


@pytest.mark.parametrize("name", SOURCES)
def test_a_recipe_has_its_source_s_values_and_no_other(name: str) -> None:
    config = load_preset(name)
    batch = config.global_batch(NUM_GPUS)
    converted = {"global batch": batch, "peak learning rate": config.learning_rate * batch / REFERENCE_BATCH,
                 "ema of 32 steps, of 0.99998": config.ema_decay**32}
    said = {field: (value, url) for url, values in SOURCES[name].items() for field, value in values.items()}
    for field, (value, url) in said.items():
        ours = converted[field] if field in converted else getattr(config, field)
        assert ours == (pytest.approx(value, rel=1e-12) if field in converted else value), f"{field}: {url}"
    for field in dataclasses.fields(Config):
        if getattr(config, field.name) != field.default:
            assert field.name in said or field.name in OUR_OWN, f"who says {field.name}?"


def test_torchvision_s_average_is_the_one_of_its_train_py() -> None:
    """adjust = world_size * batch_size * model_ema_steps / epochs; decay = 1 - min(1, (1 - model_ema_decay) * adjust)

    Source: references/classification/train.py, of 8 processes with 128 images each, 32 steps and 600 epochs.
    """
    decay = 1 - (1 - 0.99998) * (8 * 128 * 32 / 600)
    assert decay == pytest.approx(0.9989077333333333, rel=1e-12)


@pytest.mark.long
@pytest.mark.usefixtures("narrow_network")
@pytest.mark.parametrize("name", ["resnet50_a1_600ep", "cifar10_strong"])
def test_a_run_with_all_ingredients_goes_on_with_equal_bits(name, tiny_data, run_train, tmp_path) -> None:
    """Each ingredient as in the preset, except for the network and the sizes."""
    options = ["--config", name, "--data", tiny_data, "--model", "resnet18", "--image-size", "32", "--val-image-size",
               "32", "--batch-size", "4", "--epochs", "1", "--device", "cpu", "--num-threads", "1",
               "--no-tensorboard", "--checkpoint-minutes", "0", "--validate-every", "0"]
    for part, limit in (("whole", ()), ("parts", ("--max-steps", "3"))):
        code, _, err = run_train("--output", tmp_path / part, *options, *limit)
        assert code == 0, err
    code, _, err = run_train("--resume", tmp_path / "parts")
    assert code == 0, err
    whole, parts = (checkpoint.load(checkpoint.find(str(tmp_path / part))) for part in ("whole", "parts"))
    assert whole.progress == parts.progress and whole.progress.step == 6
    assert whole.loader_states == parts.loader_states
    for group in ("params", "aux", "ema"):
        for key, array in getattr(whole, group).items():
            assert np.array_equal(array, getattr(parts, group)[key]), f"{group} {key}"

"""The record of how images are prepared for a network: a JSON file beside its weights, in the form of timm's
config.json.

The file has the name of the weights' file, with .json, or is called config.json:

    {"architecture": "resnet50", "num_classes": 3, "label_names": ["n01440764", ...],
     "label_descriptions": {"n01440764": "tench", ...},
     "pretrained_cfg": {"input_size": [3, 224, 224], "crop_pct": 0.875, "interpolation": "bilinear",
                        "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225], "color_order": "RGB"},
     "loss": "softmax"}

Mean and standard deviation are for pixels from 0 to 1. Missing members get torchvision's values. timm's files lack two
members: `color_order`, because all of timm's networks read RGB, and `loss`, which is the option `--loss` and determines
the probabilities.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipelines.sources import Classes, class_list
from pipelines.transform import MEAN, STD
from train import losses
from train.config import Config
from train.errors import TrainError
from train.options.optimizer import LOSSES
from train.options.training import LIMITS

SIZE, CROP = 224, 0.875  # torchvision's first recipe: the shorter side is resized to 256 pixels
INTERPOLATIONS = ("bilinear", "bicubic")
CLASSES = "classes.txt"


@dataclass(frozen=True)
class Record:
    """How images are prepared for a network, and the names of its classes."""

    file: Path | None = None  # the record's file; None: there is none, and the fields below are torchvision's
    architecture: str = ""  # the network's name in timm; "": not given
    size: int = SIZE  # pixels, height and width of the network's input
    crop: float = CROP  # share of the shorter side in the centre crop
    mean: tuple[float, ...] = MEAN  # R, G, B of pixels from 0 to 255
    std: tuple[float, ...] = STD
    interpolation: str = "bilinear"
    is_bgr: bool = False  # the network reads blue, green, red; mean and std are in the order R, G, B here
    classes: Classes | None = None  # classes of the network; None: not given
    loss: str = "softmax"  # the training loss, which determines how scores become probabilities

    @property
    def settings(self) -> dict[str, Any]:
        """The equivalent options of a run."""
        return {"image_size": self.size, "val_crop_fraction": self.crop, "mean": self.mean, "std": self.std,
                "interpolation": self.interpolation, "loss": self.loss}

    def __str__(self) -> str:
        shorter = max(self.size, round(self.size / self.crop))
        mean, std = (", ".join(f"{value / 255:.3g}" for value in values) for values in (self.mean, self.std))
        return (f"{self.size} pixels of {shorter}, {self.interpolation}, mean {mean}, std {std}"
                + ", BGR" * self.is_bgr)


def find(weights: Path) -> Record:
    """The record beside a file of weights. The classes may also be in a classes.txt, one per line. Raises UserError if
    the record is invalid, or requires a feature that this program lacks.
    """
    record = Record()
    for path in (weights.with_suffix(".json"), weights.with_name("config.json")):
        if path.is_file() and (values := _values(path)):
            record = _record(path, values)
            break
    if record.classes is None and (weights.parent / CLASSES).is_file():
        return replace(record, classes=class_list(weights.parent / CLASSES, separator="\t"))
    return record


def is_one(path: Path) -> bool:
    """Whether the JSON file is a record. Raises UserError if the file is not JSON."""
    return bool(_values(path))


def to_json(config: Config, classes: Classes) -> bytes:
    """The record of one of our networks, in timm's form; timm ignores the additional members."""
    size = config.inference_image_size
    shorter = max(size, round(size / config.val_crop_fraction))
    crop = size / shorter if math.floor(size / (size / shorter)) == shorter else size / (shorter + 0.5)
    value = {
        "architecture": config.model,
        "num_classes": len(classes),
        "label_names": [key for key, _ in classes],
        "label_descriptions": dict(classes),
        "loss": losses.answer_of(config.loss),
        "pretrained_cfg": {
            "input_size": [3, size, size], "crop_pct": crop, "crop_mode": "center",
            "interpolation": config.interpolation, "color_order": "RGB",
            "mean": [value / 255 for value in config.mean], "std": [value / 255 for value in config.std],
        },
    }
    return json.dumps(value, indent=1).encode() + b"\n"


def _values(path: Path) -> dict[str, Any]:
    """The content of the JSON file as one dictionary; {} if it is not a record, such as a run's config.json."""
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise TrainError(f"cannot read {path} ({error.strerror}), which says how images are prepared: check its "
                         "permissions") from None
    except (ValueError, RecursionError) as error:
        raise TrainError(f"{path}, which says how images are prepared for these weights, is not JSON ({error}): "
                         "correct or remove it") from None
    if not isinstance(found, dict) or not {"architecture", "pretrained_cfg"} & found.keys():
        return {}
    inner = found.get("pretrained_cfg")
    return found | inner if isinstance(inner, dict) else found


def _record(path: Path, values: dict[str, Any]) -> Record:
    try:
        return _checked(path, values)
    except ValueError as error:
        raise TrainError(f"{path} says how images are prepared for these weights, but {error}: correct or remove it"
                         ) from None


def _checked(path: Path, values: dict[str, Any]) -> Record:
    shape = values.get("input_size") or [3, SIZE, SIZE]
    size = pixels("input_size", shape[-1] if isinstance(shape, list) else shape)
    if shape != [3, size, size]:
        raise ValueError(f"this program does not support images of {reprlib.repr(shape)} (input_size)")
    crop = part("crop_pct", values.get("crop_pct") or CROP)
    known("crop_mode", values.get("crop_mode") or "center", ("center",))
    turn = -1 if known("color_order", values.get("color_order") or "RGB", ("RGB", "BGR")) == "BGR" else 1
    mean, std = (default if values.get(name) is None else of_pixels(name, values[name], 255)
                 for name, default in (("mean", MEAN), ("std", STD)))
    if changed := values.get("model_args"):  # model_args change BatchNorm's epsilon, the activation, ...
        raise ValueError(f"its model_args {reprlib.repr(changed)} change the network")
    architecture = values.get("architecture") or ""
    if not isinstance(architecture, str):
        raise ValueError(f"its architecture {reprlib.repr(architecture)} is not a name")
    return Record(
        file=path,
        architecture=architecture.partition(".")[0],
        size=size,
        crop=size / math.floor(size / crop),  # timm rounds the resized side down
        mean=mean[::turn],
        std=std[::turn],
        interpolation=known("interpolation", values.get("interpolation") or "bilinear", INTERPOLATIONS),
        is_bgr=turn < 0,
        classes=_classes(values),
        loss=known("loss", values.get("loss") or "softmax", LOSSES),
    )


def _classes(values: dict[str, Any]) -> Classes | None:
    keys, texts = values.get("label_names"), values.get("label_descriptions") or {}
    if not keys:
        return None
    if not isinstance(texts, dict):
        raise ValueError("its label_descriptions are not a dictionary")
    return classes("label_names", keys, [texts.get(key, key) for key in names("label_names", keys)])


# --- checks of a file's values, also for the metadata of ONNX exports; all raise ValueError ---


def pixels(name: str, value: Any) -> int:
    """Check an image size."""
    return _within(name, value, "image_size", (int,))


def part(name: str, value: Any) -> float:
    """Check the centre crop's share of the shorter side."""
    return _within(name, value, "val_crop_fraction", (int, float))


def of_pixels(name: str, value: Any, factor: int = 1) -> tuple[float, ...]:
    """Check mean or std (`name`) of R, G and B, and multiply by `factor`, so that the values are for pixels from 0 to
    255.
    """
    is_good, words = LIMITS[name]
    if not (isinstance(value, list) and len(value) == 3 and all(type(number) in (int, float) for number in value)
            and is_good([factor * number for number in value])):
        times = f" times {factor}" if factor > 1 else ""
        raise ValueError(f"its {name} {reprlib.repr(value)}{times} is not {words}")
    return tuple(factor * float(number) for number in value)


def known(name: str, value: Any, choices: Sequence[str]) -> str:
    """Check that the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"its {name} {reprlib.repr(value)} is not one of this program's ({', '.join(choices)})")
    return value


def names(name: str, value: Any) -> list[str]:
    """Check a list of names."""
    if not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
        raise ValueError(f"its {name} are not a list of names")
    return value


def classes(name: str, keys: Any, shown: Any) -> Classes:
    """Check and combine the lists of the classes' keys (called `name` in messages) and display names."""
    if len(set(names(name, keys))) < len(keys):
        raise ValueError(f"its {name} contain a name twice")
    if len(names(f"names to show for the {name}", shown)) != len(keys):
        raise ValueError(f"it has {len(keys):,} {name}, but {len(shown):,} names to show for them")
    return list(zip(keys, shown, strict=True))


def _within(name: str, value: Any, option: str, types: tuple[type, ...]) -> Any:
    """Check a number against the limits of an option of this program."""
    is_good, words = LIMITS[option]
    if type(value) not in types or not is_good(value):
        raise ValueError(f"its {name} {reprlib.repr(value)} is not {words}")
    return value

"""The built-in sample set: twelve classes of textures, drawn by this file, for a first run without any download.

Each image is a light pattern on a dark ground. Colours, scale, angle and place are random; the pattern is bent a
little, lit unevenly, and covered with clutter and noise. Colour, brightness and size say nothing about the class, so a
network must recognise the pattern. It is drawn as a scalar field over plane coordinates (u, v) whose unit is the
pattern's period.

The files are identical on every system. To ensure this, every number that multiplies a field is a Python number,
because NumPy 1 and 2 promote NumPy scalars differently. For the same reason angles are not computed by the C library.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from pipelines.errors import DataError, check_not_negative
from pipelines.options import SAMPLES
from pipelines.progress import map_in_order

SAMPLES_FOLDER = Path("data/samples")
NUM_TRAIN = 150  # images of each class
NUM_VAL = 25
_VERSION = 3  # raised whenever the drawing changes, so that an older set is not mistaken for the present one
_MARKER = "samples.json"
TINT = 50.0  # largest deviation of a colour's channel from grey, of 255
_LUMA = np.array((0.299, 0.587, 0.114))  # weights of R, G, B: ITU-R BT.601

Field = np.ndarray  # float32 (height, width)


def _wave(x: Field) -> Field:
    """A soft square wave of period 1 between 0 and 1."""
    return np.clip(0.5 + 2.5 * np.sin(2 * np.pi * x), 0, 1)


def _cell(x: Field) -> Field:
    """Position in the cell of size 1, from -0.5 to 0.5."""
    return x - np.floor(x) - 0.5


def _inside(distance: Field) -> Field:
    """1 where a signed distance is negative, 0 where it is positive, soft between."""
    return np.clip(0.5 - 12 * distance, 0, 1)


# _angle splits the arc tangent at _POINTS, whose arc tangents are _ANGLES (fp32) plus _REST (the rounding error).
_POINTS = np.array((0, 0.5, 1, 1.5, 0), np.float32)  # the last one stands for infinity
_ANGLES = np.array((0, 0.46364760399, 0.78539812565, 0.98279368877, 1.5707962513), np.float32)
_REST = np.array((0, 5.0121582440e-09, 3.7748947079e-08, 3.4473217170e-08, 7.5497894159e-08), np.float32)
_LIMITS = np.array((7 / 16, 11 / 16, 19 / 16, 39 / 16), np.float32)
_SERIES = np.array((
    0.33333334327, -0.20000000298, 0.14285714924, -0.11111110449, 0.090908870101, -0.076918758452, 0.066610731184,
    -0.058335702866, 0.049768779427, -0.036531571299, 0.016285819933), np.float32)  # fmt: skip
_PI, _REST_OF_PI = np.float32(np.pi), np.float32(-8.7422776573e-08)


def _angle(v: Field, u: Field) -> Field:
    """np.arctan2(v, u), but NaN where both are 0, computed like fdlibm's (Sun, 1993: e_atan2f.c, s_atanf.c).

    NumPy's arctan2 comes from the C library; the last bits of its results differ since glibc 2.41 and on CPUs with
    AVX-512.
    """
    with np.errstate(divide="ignore", invalid="ignore"):  # u may be 0
        x = np.abs(v / u)
        part = np.searchsorted(_LIMITS, x, side="right")
        point = _POINTS[part]
        x = np.where(part == 4, -1 / x, (x - point) / (1 + point * x))
    square = x * x
    fourth = square * square
    even, odd = _SERIES[-1], _SERIES[-2]
    for i in range(len(_SERIES) - 3, -1, -2):
        even = _SERIES[i] + fourth * even
    for i in range(len(_SERIES) - 4, 0, -2):
        odd = _SERIES[i] + fourth * odd
    angle = _ANGLES[part] - ((x * (square * even + fourth * odd) - _REST[part]) - x)
    return np.copysign(np.where(u < 0, _PI - (angle - _REST_OF_PI), angle), v)


def _stripes(u: Field, v: Field, rng: np.random.Generator) -> Field:
    return _wave(u)


def _checkerboard(u: Field, v: Field, rng: np.random.Generator) -> Field:
    return np.clip(0.5 + 4 * np.sin(np.pi * u) * np.sin(np.pi * v), 0, 1)


def _dots(u: Field, v: Field, rng: np.random.Generator) -> Field:
    return _inside(np.hypot(_cell(u), _cell(v)) - rng.uniform(0.25, 0.38))


def _rings(u: Field, v: Field, rng: np.random.Generator) -> Field:
    return _wave(np.hypot(u, v))


def _bricks(u: Field, v: Field, rng: np.random.Generator) -> Field:
    row = np.floor(v)
    along = _cell(u / 2 + row / 2)
    return _inside(np.maximum(np.abs(along) * 2 - 0.9, np.abs(_cell(v)) - 0.4))


def _chevrons(u: Field, v: Field, rng: np.random.Generator) -> Field:
    return _wave(v + 2 * np.abs(_cell(u / 2)) * rng.uniform(1.0, 1.6))


def _honeycomb(u: Field, v: Field, rng: np.random.Generator) -> Field:
    # The centres of the hexagons form two rectangular lattices, shifted by half a cell; the nearest centre counts.
    height = np.sqrt(np.float32(3))
    x, y = _cell(u), height * _cell(v / height)
    other_x, other_y = _cell(u + 0.5), height * _cell(v / height + 0.5)
    nearer = np.hypot(x, y) < np.hypot(other_x, other_y)
    x, y = np.abs(np.where(nearer, x, other_x)), np.abs(np.where(nearer, y, other_y))
    return _inside(np.maximum(x, x / 2 + y * height / 2) - 0.41)


def _spiral(u: Field, v: Field, rng: np.random.Generator) -> Field:
    arms = int(rng.integers(2, 5)) * (1 if rng.random() < 0.5 else -1)
    return _wave(np.hypot(u, v) + arms * _angle(v, u) / (2 * np.pi))


def _triangles(u: Field, v: Field, rng: np.random.Generator) -> Field:
    row = np.floor(v)
    x = np.abs(_cell(u + row / 2))
    return _inside(2 * x + _cell(v) - 0.5)


def _clouds(u: Field, v: Field, rng: np.random.Generator) -> Field:
    total = np.zeros_like(u)
    for octave in range(5):
        for _ in range(3):
            angle, phase = rng.uniform(0, 2 * np.pi, 2).tolist()
            frequency = 2.0 ** (octave - 1) * rng.uniform(0.7, 1.3)
            bent = math.cos(angle) * u + math.sin(angle) * v + 0.4 * total
            total = total + 0.5**octave * np.sin(2 * np.pi * frequency * bent + phase) / 3
    return np.clip(0.5 + 0.6 * total, 0, 1)


def _rays(u: Field, v: Field, rng: np.random.Generator) -> Field:
    return _wave(int(rng.integers(8, 13)) * _angle(v, u) / (2 * np.pi))


def _crosses(u: Field, v: Field, rng: np.random.Generator) -> Field:
    x, y = np.abs(_cell(u)), np.abs(_cell(v))
    arm = np.float32(rng.uniform(0.09, 0.14))
    return _inside(np.minimum(np.maximum(x - arm, y - 0.38), np.maximum(y - arm, x - 0.38)))


PATTERNS: dict[str, Callable[[Field, Field, np.random.Generator], Field]] = {
    "bricks": _bricks,
    "checkerboard": _checkerboard,
    "chevrons": _chevrons,
    "clouds": _clouds,
    "crosses": _crosses,
    "dots": _dots,
    "honeycomb": _honeycomb,
    "rays": _rays,
    "rings": _rings,
    "spiral": _spiral,
    "stripes": _stripes,
    "triangles": _triangles,
}
_CENTRED = ("rays", "rings", "spiral")  # a single figure around a point of the picture, not a repeated cell


def draw(pattern: str, rng: np.random.Generator) -> Image.Image:
    """Draw a picture of a class. Its shorter side has 96 to 160 pixels, three to five times `cpu_sample`'s image size.
    """
    shorter, aspect = rng.uniform(96, 160), rng.uniform(1, 1.6)
    width, height = int(shorter * aspect), int(shorter)
    if rng.random() < 0.4:
        width, height = height, width
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    x, y = (x - width / 2) / np.float32(shorter), (y - height / 2) / np.float32(shorter)

    field = PATTERNS[pattern](*_plane(x, y, pattern in _CENTRED, rng), rng)[..., None]
    dark, light = _two_colours(rng)
    image = dark + (light - dark) * field
    image = _clutter(image, x, y, rng)
    angle, strength = rng.uniform(0, 2 * np.pi), rng.uniform(0, 0.3)
    image *= (1 + strength * (math.cos(angle) * x + math.sin(angle) * y))[..., None]
    image += rng.normal(0, rng.uniform(2, 6), (height, width, 1)).astype(np.float32)
    return Image.fromarray(np.clip(image, 0, 255).astype(np.uint8))


def _plane(x: Field, y: Field, centred: bool, rng: np.random.Generator) -> tuple[Field, Field]:
    """Coordinates of the pattern's plane: rotated, scaled, in perspective, slightly bent."""
    angle = rng.uniform(-0.15, 0.15)  # radians
    # periods across the shorter side; in an image of 32 pixels a period has about ten pixels
    periods = rng.uniform(2.5, 3.2)
    tilt = rng.uniform(-0.1, 0.1, 2).tolist()
    depth = 1 + tilt[0] * x + tilt[1] * y
    phase = rng.uniform(0, 2 * np.pi, 2).tolist()
    bend = rng.uniform(0, 0.01)
    bent_x = x + bend * np.sin(9 * y + phase[0])
    bent_y = y + bend * np.sin(9 * x + phase[1])
    offset = (rng.uniform(-0.25, 0.25, 2) * periods if centred else rng.uniform(0, 1, 2)).tolist()
    cos, sin = math.cos(angle), math.sin(angle)
    u = (cos * bent_x - sin * bent_y) * periods / depth + offset[0]
    v = (sin * bent_x + cos * bent_y) * periods / depth + offset[1]
    return u.astype(np.float32), v.astype(np.float32)


def _two_colours(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw a dark and a light colour: tints of two clearly different greys."""
    while True:
        dark, light = rng.uniform(20, 235, 2)  # luma of the two colours
        if light - dark > 60:
            break
    tints = rng.uniform(-TINT, TINT, (2, 3))
    tints -= tints @ _LUMA[:, None]
    return (dark + tints[0]).astype(np.float32), (light + tints[1]).astype(np.float32)


def _clutter(image: np.ndarray, x: Field, y: Field, rng: np.random.Generator) -> np.ndarray:
    """Draw, with probability 1/2, a disc or a bar of another colour in front."""
    for _ in range(rng.integers(0, 2)):
        left, top = rng.uniform(-0.6, 0.6, 2).tolist()
        size, angle = rng.uniform(0.05, 0.16), rng.uniform(0, np.pi)
        cos, sin = math.cos(angle), math.sin(angle)
        along = cos * (x - left) + sin * (y - top)
        across = sin * (x - left) - cos * (y - top)
        inside = np.hypot(along, across) < size if rng.random() < 0.5 else (abs(across) < size / 4) & (abs(along) < 0.6)
        image = np.where(inside[..., None], rng.uniform(0, 255, 3).astype(np.float32), image)
    return image


def data_path(data: str) -> str:
    """The path of the data. SAMPLES stands for the built-in set's folder, and is drawn if missing. Raises DataError."""
    if data != SAMPLES:
        return data
    make_samples(SAMPLES_FOLDER)
    return str(SAMPLES_FOLDER)


def make_samples(
    folder: Path, num_train: int = NUM_TRAIN, num_val: int = NUM_VAL, seed: int = 0, num_threads: int = 0
) -> bool:
    """Write the sample set into `folder` as train/CLASS/*.jpg and val/CLASS/*.jpg; raises DataError.

    Equal numbers and seeds give equal files. Returns False, and does nothing, if the set exists already.
    """
    if num_train < 1 or num_val < 1:
        raise DataError(f"{num_train} training and {num_val} validation images a class; give at least 1 of each")
    check_not_negative(seed=seed, num_threads=num_threads)
    description = {"version": _VERSION, "num_train": num_train, "num_val": num_val, "seed": seed}
    if folder.exists():
        found = _description_of(folder)
        if found == description:
            return False
        if found.get("version", _VERSION) != _VERSION:
            raise DataError(f"{folder} holds the sample set of another version of this program: remove that folder, "
                            "so that the set is drawn again, or choose another folder")
        if not folder.is_dir() or any(folder.iterdir()):
            raise DataError(f"{folder} holds something other than this sample set; remove it or choose another folder")
    jobs = [
        (split, pattern, i)
        for split, count in (("train", num_train), ("val", num_val))
        for pattern in PATTERNS
        for i in range(count)
    ]
    # The process id alone is not unique: containers that share the folder may all run as process 1.
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}-{secrets.token_hex(4)}")

    def write(job: tuple[str, str, int]) -> None:
        split, pattern, i = job
        rng = np.random.default_rng([seed, split == "val", list(PATTERNS).index(pattern), i])
        path = partial / split / pattern / f"{i:04}.jpg"
        draw(pattern, rng).save(path, quality=int(rng.integers(80, 96)))

    try:
        for split in ("train", "val"):
            for pattern in PATTERNS:
                (partial / split / pattern).mkdir(parents=True)
        for _ in map_in_order(write, jobs, len(jobs), "drawing the sample set", num_threads):
            pass
        (partial / _MARKER).write_text(json.dumps(description))
        partial.rename(folder)  # the renaming is atomic, and replaces at most an empty folder
    except OSError as error:
        if _description_of(folder) == description:  # another process has drawn it meanwhile
            return False
        raise DataError(
            f"{folder}: the sample set cannot be written ({error.strerror}); free space or choose another folder"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return True


def _description_of(folder: Path) -> dict[str, object]:
    """Read the marker file of a sample set; empty if there is no readable one."""
    try:
        found = json.loads((folder / _MARKER).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}

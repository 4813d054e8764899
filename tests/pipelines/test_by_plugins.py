"""Augmentations of plug-ins: their place in the graph, their random numbers, and errors."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from common import plugins
from common.errors import UserError
from pipelines import ImageTransform, LoaderConfig, open_loader
from pipelines.__main__ import main
from pipelines.graph import GraphConfig

HEAD = "import nvidia.dali.fn as fn\nimport nvidia.dali.types as types\nfrom train.plugins import augmentation\n\n"
PAINT = HEAD + '''
@augmentation
def red(images, random):
    return images * fn.cast(fn.stack(1, 0, 0), dtype=types.UINT8)

@augmentation
def constant(images, random):
    """Every pixel: the first random number, out of 200."""
    return fn.cast(images * 0 + 200 * random[0], dtype=types.UINT8)
'''


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    folder, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(seed)
    for split, name in ((split, name) for split in ("train", "val") for name in "ab"):
        (folder / split / name).mkdir(parents=True)
        for number in range(8):
            pixels = rng.integers(50, 256, (40, 48, 3), np.uint8)
            Image.fromarray(pixels).save(folder / split / name / f"{number}.png")
    return folder


@pytest.fixture
def settings(photos: Path) -> LoaderConfig:
    transform = ImageTransform(mean=(0, 0, 0), std=(1, 1, 1))  # pixels keep their values
    return LoaderConfig(data=str(photos), split="train", batch_size=4, image_size=32, num_threads=1,
                        transform=transform)


def batches(settings: LoaderConfig, names: tuple[str, ...], shard: tuple[int, int] = (0, 1), skip: int = 0
            ) -> list[np.ndarray]:
    """The batches of an epoch without the first `skip`, as in a resumed run."""
    config = replace(settings, transform=replace(settings.transform, augment=names))
    state = b""
    if skip:
        with open_loader(config, shard=shard) as loader:
            for _ in zip(range(skip), loader, strict=False):
                state = loader.state()
    with open_loader(config, shard=shard) as loader:
        if skip:
            loader.restore(state)
        return [batch.data.asnumpy() for batch in loader]


def test_in_their_order(plugin: Callable[..., Path], settings: LoaderConfig) -> None:
    plugins.load([str(plugin(PAINT))])
    (red, *_) = batches(settings, ("red",))
    assert (red[..., 0] > 0).all() and not red[..., 1:].any()
    both = batches(settings, ("red", "constant"))[0]
    assert both[..., 1].any() and (both == both[:, :1, :1]).all()  # the earlier red is forgotten
    assert not batches(settings, ("constant", "red"))[0][..., 1:].any()
    assert batches(replace(settings, split="val"), ("red",))[0][..., 1:].any()  # only of training images


def test_random_numbers_follow_from_the_place(plugin: Callable[..., Path], settings: LoaderConfig) -> None:
    plugins.load([str(plugin(PAINT))])
    whole = batches(settings, ("constant",))
    values = [float(image[0, 0, 0]) for batch in whole for image in batch]
    assert len(set(values)) > 8 and min(values) < 100 < max(values)
    resumed = batches(settings, ("constant",), skip=2)
    np.testing.assert_array_equal(np.concatenate(resumed), np.concatenate(whole[2:]))
    parts = [batches(replace(settings, batch_size=2), ("constant",), shard=(rank, 2)) for rank in range(2)]
    for batch, *halves in zip(whole, *parts, strict=True):
        np.testing.assert_array_equal(batch, np.concatenate(halves))
    # the other random numbers do not change
    plain, red = batches(settings, ()), batches(settings, ("red",))
    np.testing.assert_array_equal(plain[1][..., 0], red[1][..., 0])


def test_kernels_get_images_of_the_final_size(
    plugin: Callable[..., Path], settings: LoaderConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With plug-ins, the graph for a GPU resizes, so that they see the same images as on a CPU."""
    config = GraphConfig(True, replace(settings.transform, augment=("red",)), 32, "float32", 3, "gpu")
    assert config.is_finished_by_kernels and not config.is_resized_by_kernels
    assert replace(config, transform=settings.transform).is_resized_by_kernels
    monkeypatch.setattr(GraphConfig, "is_finished_by_kernels", property(lambda graph: graph.training))
    plugins.load([str(plugin(PAINT))])
    # The kernels' arrays come after the labels; the loader would pass them to the kernels.
    monkeypatch.setattr("pipelines.dali_loader.DaliLoader._augmented", lambda self, images, *_: images)
    monkeypatch.setattr("pipelines.dali_loader.windows", lambda images: images)
    monkeypatch.setattr("nvidia.dali.backend.TensorListCPU.data_ptr", lambda self: 0, raising=False)
    found = batches(settings, ("red",))[0]
    assert found.shape == (4, 32, 32, 3) and found.dtype == np.uint8
    assert found[..., 0].all() and not found[..., 1:].any()


WRONG = {
    "return fn.rotate(images, angle=20)": "turns uint8 (32, 32, 3) into uint8 (42, 42, 3)",
    "return fn.cast(images, dtype=types.FLOAT)":
        "turns uint8 (32, 32, 3) into float32 (32, 32, 3): return images of the same type and size",
    "return None": "returned a NoneType: return the images, as an operator of nvidia.dali.fn gives them",
    "return fn.no_such(images)": "failed at {file}:6: AttributeError: ",
    "return fn.crop(images, crop=(64, 64))": "fails on an image of 32x32 pixels: ",
    "return fn.rotate(images, angle=random[9], keep_size=True)": "fails on an image of 32x32 pixels: ",
}


@pytest.mark.parametrize("body", WRONG)
def test_what_is_refused(body: str, plugin: Callable[..., Path], settings: LoaderConfig) -> None:
    """A wrong augmentation is refused when the data are opened, and no image is blamed."""
    file = plugin(f"{HEAD}@augmentation\ndef mine(images, random): {body}\n")
    plugins.load([str(file)])
    with pytest.raises(UserError) as caught:
        batches(settings, ("mine",))
    text = str(caught.value).removeprefix(f"the augmentation mine ({file}:5) ").removeprefix("the augmentation mine ")
    assert text.startswith(WRONG[body].format(file=file)), text


def test_no_such_name(plugin: Callable[..., Path], settings: LoaderConfig) -> None:
    with pytest.raises(UserError, match=re.escape("there is no augmentation 'tilt': load the plug-in that has it with "
                                                  "--plugin (docs/extending.md)")):
        batches(settings, ("tilt",))
    plugins.load([str(plugin(PAINT))])
    with pytest.raises(UserError, match="there is no augmentation 'rad'; did you mean red?"):
        batches(settings, ("rad",))


def test_show(plugin: Callable[..., Path], photos: Path, tmp_path: Path) -> None:
    sheet = tmp_path / "sheet.png"
    arguments = ["show", str(photos), str(sheet), "--rows", "1", "--columns", "2", "--image-size", "32"]
    assert main([*arguments, "--plugin", str(plugin(PAINT)), "--augment", "red"]) == 0
    pixels = np.asarray(Image.open(sheet).convert("RGB")).astype(int)
    assert (pixels[..., 0] - pixels[..., 1:].max(axis=2) > 100).sum() > 1000

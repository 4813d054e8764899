"""The loader: the images of each batch, their pixels, and resuming."""

import dataclasses
import io
import itertools
import json
import os
import re
from dataclasses import replace

import numpy as np
import pytest
from image_helpers import EVERYTHING, encode, operated, smooth_image, write_folder, write_records
from PIL import Image

from common.mxnet_compat import mx
from common.quiet import without_lines
from pipelines import MEAN, STD, DataError, ImageTransform, LoaderConfig, dali_loader, open_files, open_loader
from pipelines.dali_loader import READ_AHEAD, DaliLoader, decodes_on_cpu
from pipelines.graph import (
    STAGES,
    GraphConfig,
    ImageInputs,
    build_pipeline,
    derived,
    random_inputs,
)
from pipelines.policies import Draws, chosen
from pipelines.sources import open_source
from pipelines.transform import Augmentation


def config(data, **options):
    return LoaderConfig(data=str(data), **{"batch_size": 4, "image_size": 24, "num_threads": 2, **options})


def epoch_of(loader):
    """(pixels, labels) of each batch of one epoch; only the valid rows."""
    return [(b.data.asnumpy()[: b.num_valid], b.label.asnumpy()[: b.num_valid].astype(int)) for b in loader]


def labels_of(loader):
    return [labels.tolist() for _, labels in epoch_of(loader)]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_validation_counts_every_image_once(numbered, size):
    loaders = [open_loader(config(numbered, split="val", batch_size=5), (rank, size)) for rank in range(size)]
    assert len({loader.num_batches for loader in loaders}) == 1
    seen = []
    for loader in loaders:
        batches = list(loader)
        assert len(batches) == loader.num_batches
        assert all(batch.data.shape == (5, 24, 24, 3) and batch.label.shape == (5,) for batch in batches)
        labels = [batch.label.asnumpy()[: batch.num_valid].astype(int).tolist() for batch in batches]
        assert [list(batch.indices) for batch in batches] == labels, "each image has a class of its own here"
        seen += itertools.chain.from_iterable(labels)
    assert sorted(seen) == list(range(37))


@pytest.mark.parametrize("size", [1, 3])
def test_training_shards_are_equally_long_and_disjoint(numbered, size):
    loaders = [open_loader(config(numbered), (rank, size)) for rank in range(size)]
    for _ in range(2):
        epochs = [labels_of(loader) for loader in loaders]
        assert {len(epoch) for epoch in epochs} == {37 // (4 * size)}
        seen = [label for epoch in epochs for labels in epoch for label in labels]
        assert len(seen) == len(set(seen)) == 37 // (4 * size) * 4 * size


def test_epochs_are_reshuffled_by_the_seed(numbered):
    first, again, other = (open_loader(config(numbered, seed=seed)) for seed in (5, 5, 6))
    one, two = labels_of(first), labels_of(first)
    assert one != two
    assert (one, two) == (labels_of(again), labels_of(again))
    assert one != labels_of(other)


@pytest.mark.long(but=["transform0"])
@pytest.mark.parametrize("transform", [ImageTransform(), EVERYTHING])
def test_two_processes_see_what_one_with_twice_the_batch_sees(numbered, transform):
    whole = epoch_of(open_loader(config(numbered, batch_size=8, transform=transform)))
    settings = config(numbered, batch_size=4, transform=transform)
    halves = [epoch_of(open_loader(settings, (rank, 2))) for rank in range(2)]
    for (pixels, labels), *parts in zip(whole, *halves, strict=True):
        np.testing.assert_array_equal(labels, np.concatenate([part[1] for part in parts]))
        np.testing.assert_array_equal(pixels, np.concatenate([part[0] for part in parts]))


def test_a_prepared_batch_is_the_next_one(numbered):
    plain, prepared = open_loader(config(numbered)), open_loader(config(numbered))
    wanted = epoch_of(plain)
    for position in (0, 2, plain.num_batches - 1):
        list(itertools.islice(prepared, position - prepared.batch))
        state = prepared.state()
        prepared.prepare()
        assert prepared.state() == state
    np.testing.assert_array_equal(next(iter(prepared)).data.asnumpy(), wanted[-1][0])
    prepared.prepare()
    prepared.restore(state)  # a position other than the prepared one
    np.testing.assert_array_equal(next(iter(prepared)).data.asnumpy(), wanted[-1][0])


@pytest.mark.parametrize("sentence, kind", [("[cuda] CUDA allocation failed", DataError), ("no more", MemoryError)])
def test_too_little_memory(numbered, monkeypatch, sentence, kind):
    """DALI's error about GPU memory becomes a DataError that names the batch; an error about host memory stays as it
    is."""
    loader = open_loader(config(numbered))

    def build(*_):
        raise MemoryError(sentence)

    monkeypatch.setattr(dali_loader, "build_pipeline", build)
    with pytest.raises(kind, match="the GPU has no memory left for the loader's batches of 4 images|no more"):
        loader.prepare()


@pytest.mark.long(but=["train-1-transform0", "val-*"])
@pytest.mark.parametrize("split, stop, transform", [
    *itertools.product(("train", "val"), (1, 5, "last", "after the end"), (ImageTransform(),)),
    *(("train", 5, replace(EVERYTHING, auto_augment=policy))
      for policy in ("trivialaugment", "randaugment", "randaugment-timm", "autoaugment")),
])
def test_restored_loader_gives_equal_bits(numbered, split, stop, transform):
    unbroken = open_loader(config(numbered, split=split, transform=transform))
    first, second = epoch_of(unbroken), epoch_of(unbroken)

    broken = open_loader(config(numbered, split=split, transform=transform))
    if stop == "after the end":
        epoch_of(broken)
        expected = [second]
    else:
        stop = broken.num_batches if stop == "last" else stop
        list(itertools.islice(broken, stop))
        expected = [first[stop:], second]
    resumed = open_loader(config(numbered, split=split, num_threads=1, transform=transform))
    next(iter(resumed))  # it has already started at another position
    resumed.restore(broken.state())
    for epoch in expected:
        for (pixels, labels), (wanted_pixels, wanted_labels) in zip(epoch_of(resumed), epoch, strict=True):
            np.testing.assert_array_equal(labels, wanted_labels)
            np.testing.assert_array_equal(pixels, wanted_pixels)


def test_image_sizes_by_epoch(numbered):
    """The size changes at the start of an epoch, although batches are made ahead, also for a restored loader. Batches
    have the same images and windows as without the schedule."""
    sizes = (16, 16, 31)
    loader = open_loader(config(numbered, image_size=24, image_sizes=sizes))
    epochs = [epoch_of(loader) for _ in range(4)]
    for epoch, size in zip(epochs, (*sizes, 24), strict=True):
        assert len(epoch) == loader.num_batches
        assert {pixels.shape for pixels, _ in epoch} == {(4, size, size, 3)}
    plain = open_loader(config(numbered, image_size=24))
    for (pixels, labels), (wanted_pixels, wanted_labels) in zip(
        epochs[3], [epoch_of(plain) for _ in range(4)][3], strict=True
    ):
        np.testing.assert_array_equal(labels, wanted_labels)
        np.testing.assert_array_equal(pixels, wanted_pixels)

    position = open_loader(config(numbered))
    list(itertools.islice(itertools.chain.from_iterable(itertools.repeat(position)), 2 * position.num_batches + 1))
    resumed = open_loader(config(numbered, image_size=24, image_sizes=sizes))
    resumed.restore(position.state())
    for (pixels, _), (wanted, _) in zip(epoch_of(resumed), epochs[2][1:], strict=True):
        np.testing.assert_array_equal(pixels, wanted)

    assert epoch_of(open_loader(config(numbered, split="val", image_sizes=sizes)))[0][0].shape == (4, 24, 24, 3)


@pytest.mark.parametrize("size, num_left", [(1, 3), (2, 1), (3, 0), (7, 0)])
def test_position_with_another_global_batch(numbered, size, num_left):
    """18 of 37 images are seen in batches of 3 on each of 3 processes; none comes again in batches of 5 on each of
    `size` processes."""
    before = [open_loader(config(numbered, batch_size=3), (rank, 3)) for rank in range(3)]
    seen = [int(label) for loader in before for batch in itertools.islice(loader, 2) for label in batch.label.asnumpy()]
    assert len(set(seen)) == 18
    labels = []
    for rank in range(size):
        after = open_loader(config(numbered, batch_size=5), (rank, size))
        after.restore(before[0].state())
        left = labels_of(after)
        assert len(left) == num_left
        assert after.epoch == 1
        labels += [label for batch in left for label in batch]
    assert len(set(labels)) == 5 * size * num_left
    assert not set(labels) & set(seen)


def test_foreign_states_are_refused(numbered, folder):
    loader = open_loader(config(numbered))
    others = (config(numbered, seed=1), config(folder), config(numbered, split="val"))
    for other in others:
        with pytest.raises(DataError, match="the saved loader position belongs to"):
            loader.restore(open_loader(other).state())
    for garbage in (b"", b"[]", b"\xff", loader.state()[:-5], json.dumps({"epoch": 1}).encode()):
        with pytest.raises(DataError, match="cannot be read"):
            loader.restore(garbage)


def normalised(image: Image.Image) -> np.ndarray:
    return (np.asarray(image, np.float32) - np.float32(MEAN)) / np.float32(STD)


def assert_close(pixels, image, largest=16):
    """Check that a picture equals Pillow's, except for rounding to 8 bits between the steps, and edges of windows.

    The difference may be 2 levels of 255 on average, and `largest` anywhere: 16 for images without sharp edges.
    """
    difference = np.abs(pixels[..., :3].astype(np.float32) - normalised(image)) * np.float32(STD)
    assert difference.mean() < 2
    assert difference.max() < largest


@pytest.mark.parametrize("interpolation, mean, std", [
    ("bilinear", MEAN, STD), ("bicubic", (127.5, 100.0, 80.0), (127.5, 60.0, 50.0)),
])
def test_validation_transform_against_pillow(folder, interpolation, mean, std):
    files = sorted(folder.rglob("*.JPEG"))
    transform = ImageTransform(val_crop_fraction=0.8, interpolation=interpolation, mean=mean, std=std)
    loader = open_loader(config(folder, split="val", image_size=32, transform=transform))
    pixels = np.concatenate([pixels for pixels, _ in epoch_of(loader)])[..., :3] * np.float32(std) + np.float32(mean)
    pixels = (pixels - np.float32(MEAN)) / np.float32(STD)  # the scale of `assert_close`
    for got, file in zip(pixels, files, strict=True):
        with Image.open(file) as image:
            scale = 40 / min(image.size)
            width, height = round(image.width * scale), round(image.height * scale)
            resized = image.resize((width, height), Image.Resampling[interpolation.upper()])
            left, top = (width - 32 + 1) // 2, (height - 32 + 1) // 2
            expected = resized.crop((left, top, left + 32, top + 32))
        assert_close(got, expected)


def test_training_transform_against_pillow(numbered):
    """The windows are recomputed here from the same random numbers, by rejection as in torchvision's
    RandomResizedCrop."""
    transform = ImageTransform(random_area=(0.1, 0.7), random_ratio=(0.6, 1.5))
    settings = config(numbered, seed=3, transform=transform)
    source = open_source(numbered, "train")
    loader = open_loader(settings)
    flips = 0
    for k, (pixels, labels) in enumerate(epoch_of(loader)):
        rng = np.random.default_rng([3, 0, k])
        area, log_ratio, position, mirror, *_ = random_inputs(rng, 4, transform).values()
        for i, label in enumerate(labels):
            with Image.open(io.BytesIO(source.read(int(label)).tobytes())) as image:
                for part, ratio in zip(area[i], np.exp(log_ratio[i]), strict=True):
                    w = np.sqrt(part * ratio * image.width * image.height)
                    h = np.sqrt(part / ratio * image.width * image.height)
                    if w <= image.width and h <= image.height:
                        break
                else:
                    w, h = min(w, image.width), min(h, image.height)
                assert 0.55 < w / h < 1.65
                x, y = position[i] * (image.width - w, image.height - h)
                box = (round(x), round(y), min(image.width, round(x + w)), min(image.height, round(y + h)))
                expected = image.resize((24, 24), Image.Resampling.BILINEAR, box=box)
            if mirror[i]:
                expected = expected.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
                flips += 1
            assert_close(pixels[i], expected)
    assert 0 < flips < 36


@pytest.mark.parametrize("cache_gib", [0.0, 1.0])  # fed with bytes or pixels
@pytest.mark.parametrize("area", [0.001, 0.08])
def test_a_window_has_a_pixel_at_least(area, cache_gib, tmp_path, rng):
    for k, (width, height) in enumerate([(2, 2), (8, 8), (300, 2), (2, 300)]):
        (tmp_path / f"class{k}").mkdir()
        Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).save(tmp_path / f"class{k}" / "0.png")
    loader = open_loader(config(tmp_path, cache_gib=cache_gib, transform=ImageTransform(random_area=(area, area))))
    for _ in range(20):
        for pixels, _ in epoch_of(loader):
            assert np.isfinite(pixels).all() and len(pixels) == 4


@pytest.mark.parametrize("cache_gib", [0.0, 1.0])  # fed with bytes or pixels
def test_padded_windows_and_cutout_against_numpy(numbered, cache_gib, rng):
    """NumPy pads, cuts, erases and flips, Pillow resizes. `numbered` has images of 40 to 130 pixels."""
    padding, side, seed = 9, 0.3, int(rng.integers(1 << 16))
    transform = ImageTransform(crop_padding=padding, cutout=side)
    settings = config(numbered, seed=seed, transform=transform, cache_gib=cache_gib, image_size=32)
    source = open_source(numbered, "train")
    for k, (pixels, labels) in enumerate(epoch_of(open_loader(settings))):
        drawn = random_inputs(np.random.default_rng([seed, 0, k]), 4, transform)
        position = random_inputs(np.random.default_rng([seed, 0, k]), 4, ImageTransform())["position"]
        mirror, hole = drawn["mirror"], drawn["hole"]
        for i, label in enumerate(labels):
            image = np.asarray(Image.open(io.BytesIO(source.read(int(label)).tobytes())))
            height, width = image.shape[:2]
            canvas = np.full((height + 2 * padding, width + 2 * padding, 3), np.round(MEAN), np.uint8)
            canvas[padding:-padding, padding:-padding] = image
            x, y = (position[i] * (2 * padding + 1)).astype(int)
            window = canvas[y : y + height, x : x + width]
            (left, top), (right, bottom) = (np.floor((hole[i] + end * side) * (width, height)) for end in (0, 1))
            hole_pixels = slice(max(0, int(top)), int(bottom)), slice(max(0, int(left)), int(right))
            assert 0.01 < window[hole_pixels].size / window.size < 0.11  # 0.3 x 0.3, cut at the border
            window[hole_pixels] = np.round(MEAN)
            expected = Image.fromarray(window).resize((32, 32), Image.Resampling.BILINEAR)
            if mirror[i]:
                expected = expected.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            # The two resizes weigh the hole's sharp edges differently, by up to 18 levels so far. A hole that is off
            # by one pixel differs by 28 levels in the median.
            assert_close(pixels[i], expected, largest=24)


def test_brightness_against_numpy(numbered):
    """The pixels are the plain batch's times the factors that are drawn last; batches of parts have the same bits."""
    transform = ImageTransform(brightness=0.6)
    plain = epoch_of(open_loader(config(numbered, seed=3)))
    bright = epoch_of(open_loader(config(numbered, seed=3, transform=transform)))
    factors = []
    for k, ((pixels, _), (wanted, _)) in enumerate(zip(bright, plain, strict=True)):
        factors.append(random_inputs(np.random.default_rng([3, 0, k]), 4, transform)["brightness"])
        grey = np.round(wanted * STD + MEAN) * factors[-1][:, None, None, None]
        np.testing.assert_allclose(pixels * STD + MEAN, np.clip(grey, 0, 255), atol=0.51)
    assert np.min(factors) < 0.6 and np.max(factors) > 1.4 and abs(np.mean(factors) - 1) < 0.2  # of 36 from 0.4 to 1.6

    begun, resumed = (open_loader(config(numbered, seed=3, transform=transform)) for _ in range(2))
    list(itertools.islice(begun, 5))
    resumed.restore(begun.state())
    for (pixels, _), (wanted, _) in zip(epoch_of(resumed), bright[5:], strict=True):
        np.testing.assert_array_equal(pixels, wanted)


def jittered(images: np.ndarray, brightness, contrast, saturation, hue, is_grey) -> np.ndarray:
    """Apply torchvision's colour functions to uint8 (N, H, W, 3), in floats without clipping in between. The hue is a
    rotation of YIQ colours, as complex numbers."""
    luma = np.array([0.299, 0.587, 0.114])
    factors = [each[:, None, None, None] for each in (brightness, contrast, saturation)]
    pixels = images * factors[0]
    pixels = factors[1] * pixels + (1 - factors[1]) * (pixels.mean((1, 2), keepdims=True) @ luma)[..., None]
    pixels = factors[2] * pixels + (1 - factors[2]) * (pixels @ luma)[..., None]
    y = pixels @ luma
    yiq = np.array([luma, (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112)])
    _, i, q = np.moveaxis(pixels @ yiq.T, -1, 0)
    chroma = (i + 1j * q) * np.exp(1j * np.deg2rad(hue))[:, None, None]
    pixels = np.stack([y, chroma.real, chroma.imag], axis=-1) @ np.linalg.inv(yiq).T
    pixels = np.where(is_grey[:, None, None, None], (pixels @ luma)[..., None], pixels)
    return np.clip(np.round(pixels), 0, 255)


@pytest.mark.parametrize("values", [
    {"contrast": 0.8}, {"saturation": 0.9}, {"hue": 0.5}, {"grey": 0.4},
    {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1, "grey": 0.2},
])
def test_colours_against_numpy(numbered, values):
    transform = ImageTransform(**values)
    plain = epoch_of(open_loader(config(numbered, seed=3)))
    greys = 0
    for k, ((pixels, _), (before, _)) in enumerate(
        zip(epoch_of(open_loader(config(numbered, seed=3, transform=transform))), plain, strict=True)
    ):
        drawn = random_inputs(np.random.default_rng([3, 0, k]), 4, transform)
        is_grey = drawn["chance"][:, 0] < transform.grey
        greys += is_grey.sum()
        wanted = jittered(np.round(before * STD + MEAN), drawn["brightness"], *drawn["colour"].T, is_grey)
        # A level where float32 rounds to the other side.
        np.testing.assert_allclose(pixels * STD + MEAN, wanted, atol=1.01)
    assert not transform.grey or 2 < greys < 24  # of 36


def test_ranges_of_colours():
    transform = ImageTransform(contrast=0.6, saturation=0.3, hue=0.25)
    colour = random_inputs(np.random.default_rng(2), 5000, transform)["colour"]
    for values, middle, span in zip(colour.T, (1, 1, 0), (0.6, 0.3, 90), strict=True):
        assert abs(values - middle).max() <= span + 1e-4 and abs(values - middle).max() > 0.99 * span
        assert abs(values.mean() - middle) < 0.05 * span


def test_blur_and_solarise_against_numpy(numbered):
    """torchvision's Gaussian: three standard deviations to each side, mirrored at the edge without repeating it."""
    transform = ImageTransform(blur=0.6, solarise=0.4)
    plain = epoch_of(open_loader(config(numbered, seed=3)))
    num_blurred = num_solarised = 0
    for k, ((pixels, _), (before, _)) in enumerate(
        zip(epoch_of(open_loader(config(numbered, seed=3, transform=transform))), plain, strict=True)
    ):
        drawn = random_inputs(np.random.default_rng([3, 0, k]), 4, transform)
        for result, image, sigma, chance in zip(pixels * STD + MEAN, np.round(before * STD + MEAN), drawn["sigma"],
                                                drawn["chance"], strict=True):
            if chance[1] < 0.6:
                radius = int(np.ceil(3 * sigma))
                kernel = np.exp(-(np.arange(-radius, radius + 1) ** 2) / (2 * sigma**2))
                kernel /= kernel.sum()
                for axis in (0, 1):
                    padding = [(0, 0)] * 3
                    padding[axis] = (radius, radius)
                    image = np.apply_along_axis(np.convolve, axis, np.pad(image, padding, "reflect"), kernel, "valid")
                num_blurred += 1
            if chance[2] < 0.4:
                near = np.abs(image - 127.5) < 0.51  # either side of the threshold
                image = np.where(near, np.round(result), np.where(image >= 127.5, 255 - image, image))
                num_solarised += 1
            np.testing.assert_allclose(result, image, atol=1.01)
    assert 12 < num_blurred < 32 and 6 < num_solarised < 26  # of 36


def test_interpolation_of_training_images(numbered):
    """The interpolation of training images may differ from that of validation, or be drawn for each image."""
    def pixels(split="train", **values):
        loader = open_loader(config(numbered, split=split, transform=ImageTransform(**values)))
        return np.concatenate([pixels for pixels, _ in epoch_of(loader)])

    bilinear, bicubic = pixels(), pixels(interpolation="bicubic")
    np.testing.assert_array_equal(pixels(train_interpolation="bicubic"), bicubic)
    np.testing.assert_array_equal(pixels(interpolation="bicubic", train_interpolation="bilinear"), bilinear)
    np.testing.assert_array_equal(pixels("val", train_interpolation="bicubic"), pixels("val"))
    drawn = np.concatenate([random_inputs(np.random.default_rng([0, 0, k]), 4, EVERYTHING)["chance"]
                            for k in range(len(bilinear) // 4)])
    is_bicubic = drawn[:, 3] >= 0.5
    assert 8 < is_bicubic.sum() < 28  # of 36
    wanted = np.where(is_bicubic[:, None, None, None], bicubic, bilinear)
    np.testing.assert_array_equal(pixels(train_interpolation="random"), wanted)
    assert (bilinear != bicubic).any((1, 2, 3)).all()


@pytest.mark.long
def test_policy_and_erasing_against_plain_batches(numbered):
    """The pixels are the plain batch's after the operations and the erased rectangle; the size follows the epoch."""
    transform = ImageTransform(auto_augment="randaugment", random_erasing=0.6, mirror=False)
    size, seed = 26, 3
    plain = epoch_of(open_loader(config(numbered, seed=seed, image_size=size, transform=ImageTransform(mirror=False))))
    loader = open_loader(config(numbered, seed=seed, image_size=99, image_sizes=(size,), transform=transform))
    num_erased = 0
    for k, ((pixels, _), (before, _)) in enumerate(zip(epoch_of(loader), plain, strict=True)):
        drawn = random_inputs(np.random.default_rng([seed, 0, k]), 4, transform)
        inputs = ImageInputs(None, None, **drawn, size=np.full((4, 2), size, np.float32))
        values, _ = derived(transform, inputs)
        images = np.round(before * STD + MEAN).astype(np.uint8)
        draws = Draws(inputs.policy, inputs.policy_noise)
        for operation, magnitude in chosen(transform, draws, size, size):
            images = operated(images, operation, magnitude, fill=0)
        for image, start, shape, is_erased in zip(images, values.erased_from.astype(int),
                                                  values.erased_size.astype(int), values.erased, strict=True):
            if is_erased:
                assert 0.01 < shape.prod() / size**2 < 0.36 and (start >= 0).all() and (start + shape <= size).all()
                image[start[0] : start[0] + shape[0], start[1] : start[1] + shape[1]] = np.round(MEAN)
                num_erased += 1
        np.testing.assert_allclose(pixels * STD + MEAN, images, atol=1e-3)
    assert 10 < num_erased < 33  # of 36, 21.6 expected


@pytest.mark.parametrize("size", [1, 2, 3, 7, 176])
def test_erased_rectangles(size):
    """torchvision's: 2 to 33 % of the area, height / width from 0.3 to 3.3, anywhere inside, smaller than the image."""
    transform = ImageTransform(random_erasing=1.0)
    drawn = random_inputs(np.random.default_rng(4), 3000, transform)
    values, _ = derived(transform, ImageInputs(None, None, **drawn, size=np.full((3000, 2), size, np.float32)))
    start, shape = (each[values.erased] for each in (values.erased_from, values.erased_size))
    assert (start == np.floor(start)).all() and (shape == np.round(shape)).all()
    assert (start >= 0).all() and (start + shape <= size).all() and (shape < size).all()
    assert shape.any() == (size > 1)
    if size == 176:
        assert values.erased.mean() > 0.999
        area, ratio = shape.prod(1) / size**2, shape[:, 0] / shape[:, 1]
        assert 0.019 < area.min() < 0.022 and 0.32 < area.max() < 0.335 and abs(area.mean() - 0.175) < 0.01
        assert 0.29 < ratio.min() < 0.32 and 3.1 < ratio.max() < 3.4 and 0.9 < np.median(ratio) < 1.1
        assert (start == 0).any(0).all() and (start + shape == size).any(0).all()


@pytest.mark.long
def test_images_of_one_pixel_s_height_and_grey_ones(tmp_path):
    rng = np.random.default_rng(1)
    for number, (width, height, mode) in enumerate([(40, 1, "RGB"), (1, 40, "RGB"), (1, 1, "L"), (33, 21, "L")]):
        pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
        (tmp_path / str(number)).mkdir()
        Image.fromarray(pixels).convert(mode).save(tmp_path / str(number) / "image.png")
    for policy in ("trivialaugment", "randaugment", "randaugment-timm", "autoaugment"):
        settings = config(tmp_path, transform=replace(EVERYTHING, auto_augment=policy, crop_padding=0), image_size=3)
        loader = open_loader(settings)
        for _ in range(8):
            ((pixels, _),) = epoch_of(loader)
            assert pixels.shape == (4, 3, 3, 3) and np.isfinite(pixels).all()


def test_operations_follow_the_flip(numbered):
    """Images that timm's RandAugment leaves unchanged equal those of a run without it, flipped or not, although the two
    runs flip by different operators."""
    plain = epoch_of(open_loader(config(numbered, seed=3)))
    policy = epoch_of(open_loader(config(numbered, seed=3, transform=ImageTransform(auto_augment="randaugment-timm"))))
    alike = np.concatenate([np.abs(pixels - wanted).max((1, 2, 3)) * np.max(STD) < 1.01
                            for (pixels, _), (wanted, _) in zip(policy, plain, strict=True)])
    mirrored = np.concatenate([random_inputs(np.random.default_rng([3, 0, k]), 4, ImageTransform())["mirror"]
                               for k in range(len(plain))])
    assert 3 <= alike.sum() <= 20 and 0 < mirrored[alike].sum() < alike.sum()  # of 36, 9 expected


def test_validation_has_no_augmentation(numbered):
    plain, other = (open_loader(config(numbered, split="val", transform=transform))
                    for transform in (ImageTransform(), EVERYTHING))
    for (pixels, _), (wanted, _) in zip(epoch_of(other), epoch_of(plain), strict=True):
        np.testing.assert_array_equal(pixels, wanted)


def test_random_windows_cover_area_and_ratio_as_asked():
    rng = np.random.default_rng(1)
    area, log_ratio, position, mirror, hole = random_inputs(rng, 2000, ImageTransform(cutout=0.5)).values()
    assert area.min() >= 0.08 - 1e-6 and area.max() <= 1 + 1e-6
    assert abs(area.mean() - 0.54) < 0.01  # of 20,000 uniform numbers: standard error 0.002
    assert abs(log_ratio).max() <= np.log(4 / 3) + 1e-6 and abs(log_ratio.mean()) < 0.01
    assert min(position.min(), hole.min() + 0.25) >= 0 and max(position.max(), hole.max() + 0.25) < 1
    assert abs(mirror.mean() - 0.5) < 0.06  # standard error 0.011
    assert not random_inputs(np.random.default_rng(1), 50, ImageTransform(mirror=False))["mirror"].any()


def test_what_is_not_read_is_not_drawn_and_changes_no_other_draw():
    """The random numbers of one augmentation do not depend on which other augmentations are on."""
    everything = random_inputs(np.random.default_rng(7), 5, EVERYTHING)
    names = {"crop_padding": {"shift"}, "cutout": {"hole"}, "contrast": {"brightness", "colour", "chance"},
             "blur": {"chance", "sigma"}, "auto_augment": {"policy"},
             "random_erasing": {"erasing", "erasing_place"}}
    for option, read in names.items():
        drawn = random_inputs(np.random.default_rng(7), 5, ImageTransform(**{option: getattr(EVERYTHING, option)}))
        window = {"mirror"} if option == "crop_padding" else {"mirror", "area", "log_ratio", "position"}
        assert drawn.keys() == read | window, option
        for name in drawn.keys() & everything.keys() - {"colour", "brightness"}:  # whose ranges differ
            np.testing.assert_array_equal(drawn[name], everything[name], err_msg=name)
    assert random_inputs(np.random.default_rng(7), 5, ImageTransform()).keys() == window
    timm = ImageTransform(auto_augment="randaugment-timm")  # its strength has noise
    assert random_inputs(np.random.default_rng(7), 5, timm).keys() == window | {"policy", "policy_noise"}


@pytest.mark.filterwarnings("error:The external source node")  # DALI's warning about unread outputs
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("option", [field.name for field in dataclasses.fields(Augmentation)])
def test_the_graph_is_fed_with_nothing_that_it_does_not_read(stage, option):
    transform = ImageTransform(**{option: getattr(EVERYTHING, option)})
    graph = GraphConfig(training=True, transform=transform, image_size=8, dtype="float32", channels=3, device="cpu",
                        stage=stage)
    build_pipeline(graph, lambda: None, batch_size=2, num_threads=1)


def test_types_and_channels(numbered):
    full = epoch_of(open_loader(config(numbered)))
    half = epoch_of(open_loader(config(numbered, dtype="float16", channels=4)))
    for (pixels, labels), (pixels16, labels16) in zip(full, half, strict=True):
        assert pixels.dtype == np.float32 and pixels16.dtype == np.float16
        assert pixels16.shape == (4, 24, 24, 4)
        assert not pixels16[..., 3].any()
        np.testing.assert_array_equal(pixels16[..., :3], pixels.astype(np.float16))
        np.testing.assert_array_equal(labels, labels16)


def test_batches_stay_valid_while_mxnet_is_late(numbered):
    """The arrays are DALI's own memory, which MXNet must hold until its pending work has read it."""
    expected = epoch_of(open_loader(config(numbered)))
    slow = mx.nd.ones((700, 700))
    for _ in range(20):
        slow = mx.nd.dot(slow, slow) * 1e-3
    zero = slow[0, 0].reshape((1, 1, 1, 1)) * 0
    copies = [batch.data + zero for batch in open_loader(config(numbered))]  # queued behind the slow work
    for copy, (pixels, _) in zip(copies, expected, strict=True):
        np.testing.assert_array_equal(np.nan_to_num(copy.asnumpy()), pixels)


def test_files_keep_their_order_and_mistakes_are_named(folder, tmp_path):
    files = [folder / name for name in ("c02/002.JPEG", "c00/000.JPEG", "c01/004.JPEG")]
    batches = list(open_files(files, 24, 2))
    assert [batch.label.asnumpy()[: batch.num_valid].tolist() for batch in batches] == [[0, 1], [2]]
    one = next(iter(open_files(files[2:], 24, 1)))
    np.testing.assert_array_equal(batches[1].data[0].asnumpy(), one.data[0].asnumpy())
    (tmp_path / "text.jpg").write_text("hello")
    for wrong, message in (
        ([tmp_path / "none.jpg"], r"none\.jpg: cannot be read \(No such file or directory\)"),
        ([tmp_path], r"cannot be read \(a folder, not a file\)"),
        ([*files, tmp_path / "text.jpg"], r"text\.jpg: not an image"),
    ):
        with pytest.raises(DataError, match=message):
            list(open_files(wrong, 24, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0; it must be at least 1"),
        ({"batch_size": 38}, "37 training images are fewer than one batch of 38"),
        ({"image_size": 0}, "image_size is 0"),
        ({"image_size": -3}, "image_size is -3"),
        ({"image_sizes": (16, 0)}, "image_sizes has 0"),
        ({"split": "test"}, "split is 'test'; choose 'train' or 'val'"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"channels": 5}, "channels is 5; choose 3 or 4"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"on_bad_image": "ask"}, "on_bad_image is 'ask'"),
        *(({"transform": ImageTransform(**{name: value})}, message) for name, value, message in (
            ("random_area", (0.5, 0.2), "random_area is 0.5 0.2; it must be two fractions from 0.001 on, the"),
            ("random_area", (0.0, 1.0), "random_area is 0 1;"),
            ("random_ratio", (0.5, float("inf")), "random_ratio is 0.5 inf; it must be two numbers from 0.01 to 100"),
            ("val_crop_fraction", 1.5, "val_crop_fraction is 1.5; it must be from 0.1 to 1"),
            ("crop_padding", -4, "crop_padding is -4; it must be from 0 to 256"),
            ("crop_padding", 100_000, "crop_padding is 100000; it must be from 0 to 256"),
            ("cutout", 8.0, "cutout is 8; it must be a fraction from 0 to 1"),
            ("brightness", -0.1, "brightness is -0.1; it must be a fraction from 0 to 1"),
            ("hue", 0.6, "hue is 0.6; it must be from 0 to 0.5, half of the colour circle"),
            ("contrast", float("nan"), "contrast is nan; it must be a fraction from 0 to 1"),
            ("blur", -0.1, "blur is -0.1; it must be a probability from 0 to 1"),
            ("random_erasing", 1.1, "random_erasing is 1.1; it must be a probability from 0 to 1"),
            ("randaugment_operations", 5, "randaugment_operations is 5; it must be from 1 to 4"),
            ("randaugment_magnitude", -1.0, "randaugment_magnitude is -1; it must be from 0 to 30"),
        )),
        ({"transform": ImageTransform(auto_augment="randaugment-timm", randaugment_magnitude=11.0)},
         "--randaugment-magnitude 11 is too large for --auto-augment randaugment-timm"),
        ({"transform": ImageTransform(auto_augment="autoaugment"), "image_size": 2},
         "image_size is 2, and autoaugment needs at least 3 pixels"),
        ({"num_threads": -1}, "num_threads is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"cache_gib": -0.5}, "cache_gib is -0.5; it cannot be negative"),
    ],
)
def test_values_that_cannot_be(numbered, options, message):
    with pytest.raises(DataError, match=message):
        open_loader(config(numbered, **options))


def test_a_gpu_that_is_not_there(numbered):
    for data in (numbered, "synthetic"):
        with pytest.raises(DataError, match=r"GPU 99 is requested, but CUDA finds \d+ GPUs here"):
            open_loader(config(data, device="gpu", device_id=99))


@pytest.mark.gpu
@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("options", [{"decoder": "gpu"}, {"decoder": "cpu"}, {"cache_gib": 1.0}])
@pytest.mark.parametrize("transform", [ImageTransform(), ImageTransform(crop_padding=9, cutout=0.3),
                                       ImageTransform(brightness=0.6), EVERYTHING])
def test_the_gpu_makes_the_same_batches(numbered, split, options, transform):
    on_cpu = epoch_of(open_loader(config(numbered, split=split, transform=transform)))
    on_gpu = epoch_of(open_loader(config(numbered, split=split, transform=transform, device="gpu", **options)))
    for (pixels, labels), (gpu_pixels, gpu_labels) in zip(on_cpu, on_gpu, strict=True):
        np.testing.assert_array_equal(labels, gpu_labels)
        # Other decoders and resizers: images without sharp edges differ by less than 3 of 255 levels on average.
        by_image = np.abs(pixels - gpu_pixels).mean((1, 2, 3)) * np.mean(STD)
        assert by_image.mean() < 3, f"levels by image: {by_image.round(1)}"


def test_shards_that_cannot_be(numbered):
    for shard in ((1, 1), (-1, 2), (0, 0)):
        with pytest.raises(DataError, match="does not exist"):
            open_loader(config(numbered), shard)
    with pytest.raises(DataError, match="fewer than one batch of 40"):
        open_loader(config(numbered), (0, 10))


def test_folders_and_records_give_the_same_batches(tmp_path):
    files = write_folder(tmp_path / "f", 9, 3, seed=4)
    source = open_source(tmp_path / "f", "train")
    images = [source.read(i).tobytes() for i in range(9)]
    assert images == [file.read_bytes() for file in files]
    write_records(tmp_path / "r.rec", images, [float(source.label(i)) for i in range(9)])
    for split in ("train", "val"):
        from_files, from_records = (
            epoch_of(open_loader(config(tmp_path / name, split=split))) for name in ("f", "r.rec")
        )
        for (a, la), (b, lb) in zip(from_files, from_records, strict=True):
            np.testing.assert_array_equal(a, b)
            np.testing.assert_array_equal(la, lb)


def test_images_are_asked_for_before_they_are_read(numbered, monkeypatch):
    source = open_source(numbered, "train")
    asked: list[list[int]] = []
    fed: list[int] = []
    read_ahead, feed = source.read_ahead, source.feed

    def watch_read_ahead(indices):
        asked.append(list(indices))
        read_ahead(asked[-1])

    def watch_feed(i):
        assert i in asked[len(fed) // 5]  # batches are asked for in their order,
        assert len(asked) > len(fed) // 5 + READ_AHEAD  # and so many before this one is read
        fed.append(i)
        return feed(i)

    monkeypatch.setattr(source, "read_ahead", watch_read_ahead)
    monkeypatch.setattr(source, "feed", watch_feed)
    with DaliLoader(LoaderConfig(data=str(numbered), batch_size=5, image_size=16), (0, 1), source) as loader:
        loader._is_known[:] = True  # skip the inspection of headers
        for _ in range(2):  # epochs: read-ahead continues into the next epoch
            labels = [batch.label.asnumpy() for batch in loader]
        assert len(labels) == 7 and len(fed) >= 2 * 35


@pytest.mark.parametrize(("encoded_bytes", "decoder", "on_cpu"), [
    (3000, "auto", True), (30000, "auto", False), (3000, "gpu", False), (30000, "cpu", True)])
def test_thumbnails_are_decoded_on_the_cpu_for_a_gpu(tmp_path, encoded_bytes, decoder, on_cpu):
    write_records(tmp_path / "train.rec", [bytes(encoded_bytes)] * 3, [0.0, 1.0, 2.0])
    source = open_source(tmp_path, "train")
    assert decodes_on_cpu(config(tmp_path, device="gpu", decoder=decoder), source) is on_cpu
    assert not decodes_on_cpu(config(tmp_path, decoder="auto"), source)  # nothing to choose on the CPU


def test_lines_that_libraries_write_are_kept_off_stderr(capfd):
    with without_lines(re.compile(rb"unwanted")):
        os.write(2, b"one\nunwanted: two\nthree\n")
    os.write(2, b"unwanted later\n")
    with pytest.raises(ValueError), without_lines(re.compile(rb"unwanted")):
        os.write(2, b"unwanted\nbefore the error\n")
        raise ValueError
    assert capfd.readouterr().err == "one\nthree\nunwanted later\nbefore the error\n"


@pytest.mark.parametrize("cache_gib", [0.0, 1.0])
def test_class_folders_that_were_swapped_end_a_resumed_run(tmp_path, cache_gib):
    """The run does not end if an image was repaired, if the data were moved, or if the position was saved by a version
    that stored no images."""
    write_folder(tmp_path / "data", 24, 3, seed=1)

    def loader(data="data"):
        return open_loader(LoaderConfig(data=str(tmp_path / data), batch_size=4, image_size=16, cache_gib=cache_gib))

    with loader() as before:
        next(iter(before))
        state = before.state()
    (tmp_path / "data").rename(tmp_path / "moved")
    first = tmp_path / "moved/c00/000.JPEG"
    first.write_bytes(encode(smooth_image(np.random.default_rng(2), 99, 99)))
    with loader("moved") as same:
        same.restore(state)
        assert same.batch == 1
    for name, to in (("c00", "c"), ("c02", "c00"), ("c", "c02")):
        (tmp_path / "moved" / name).rename(tmp_path / "moved" / to)
    with loader("moved") as swapped:
        with pytest.raises(DataError, match=r"belongs to other images of these classes: 'c00', 'c02' \(their folders "
                                            r"may have been swapped or replaced\); resume with the same data"):
            swapped.restore(state)
        older = {name: value for name, value in json.loads(state).items() if name != "classes"}
        swapped.restore(json.dumps(older).encode())

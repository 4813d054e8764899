"""What each command takes besides `train`, whose options are those of `config.Config`; imports nothing slow."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from common.limits import ABOVE_0, AT_LEAST_1, NOT_NEGATIVE, Limit
from train.options import language_model
from train.options.data import (
    BatchOptions,
    CacheOptions,
    DataOptions,
    ImageOptions,
    InferenceImageOptions,
    LoaderOptions,
)
from train.options.network import DroppingOptions, NetworkOptions
from train.options.optimizer import OptimizerOptions
from train.options.run import DeviceOptions, DistributedOptions, LogOptions, RunOptions
from train.options.training import TrainingOptions


@dataclass(frozen=True)
class ValidateOptions(LoaderOptions, InferenceImageOptions, BatchOptions, DeviceOptions, DataOptions):
    """Print loss and accuracy of a trained network on validation data.

    What is not given is as it was in the run that trained it.
    """

    checkpoint: Annotated[str, "PATH"] = ""
    """Run folder, checkpoint or weights of another program (docs/fine_tuning.md) that are validated; of a run folder,
    its best checkpoint."""
    int8: bool = False
    """Validate the network in INT8 that `quantize` has made of it: on the CPU, with --device gpu on a GPU."""
    report: Annotated[str, "FOLDER"] = ""
    """Also write a report into this new folder: what is taken for what, accuracy by class, the surest mistakes,
    calibration."""


@dataclass(frozen=True)
class QuantizeOptions(LoaderOptions, InferenceImageOptions, BatchOptions, DataOptions):
    """Make a trained network one in INT8, and print what that costs in accuracy.

    Convolutions compute with 8-bit integers, whose ranges come from training images. Written beside the checkpoint.
    What is not given is as it was in the run that trained it. On the CPU.
    """

    checkpoint: Annotated[str, "PATH"] = ""
    """Run folder, checkpoint or weights of another program (docs/fine_tuning.md); of a run folder, its best
    checkpoint."""
    calibration: Literal["max", "percentile", "entropy"] = "entropy"
    """How the range of a tensor is found: its largest absolute value, the one that 0.01 % exceed, or the one that keeps
    the distribution (Kullback-Leibler divergence; TensorRT's way)."""
    images: int = 512
    """Training images that the ranges come from; where it is not given and the data has fewer, all of them."""
    float_first: bool = False
    """Leave the first convolution, which reads the images, in floats."""
    int8_classifier: bool = False
    """Compute the classifier in INT8 too."""
    overwrite: bool = False
    """Replace the network in INT8 that these weights have already."""


@dataclass(frozen=True)
class Measurement:
    """The measurement."""

    warmup_steps: int = 10
    """First steps, which do not count."""
    min_steps: int = 20
    """Steps measured at least."""
    limit_steps: int = 1000
    """Measure at most this many steps, even if the median is still uncertain."""
    limit_minutes: float = 5.0
    """End after this many minutes, even if the median is still uncertain."""
    profile: bool = False
    """Executor cuda: also measure each operator of the step; printed, and written to profile.txt in the run folder."""
    inference: bool = False
    """Measure inference instead: images/sec, latency, memory and energy over batch sizes, in each precision that the
    executor has or in that of --dtype, on generated images (docs/inference.md); printed, and written as JSON and as a
    plot. The network is ResNet-50 with 1,000 classes at 224 pixels, where the options do not say otherwise."""
    int8: bool = False
    """With --inference: measure INT8, on a GPU."""
    batch_sizes: Annotated[tuple[int, ...], "N"] = ()
    """With --inference: the batch sizes; default: 1 to 2,048 by powers of two as far as memory allows, on a CPU to
    16."""


@dataclass(frozen=True)
class BenchmarkOptions(LogOptions, DistributedOptions, OptimizerOptions, CacheOptions, LoaderOptions, ImageOptions,
                       BatchOptions, DroppingOptions, NetworkOptions, DeviceOptions, DataOptions, RunOptions,
                       Measurement):
    """Measure the speed of training steps, which are repeated until it is known to 1 %, or of inference."""


@dataclass(frozen=True)
class Comparison:
    """The comparison."""

    precisions: tuple[Literal["float32", "tf32", "float16", "bfloat16"], ...] = (
        "float32", "tf32", "float16", "bfloat16",
    )
    """Precisions to train in; the CPU has float32 only."""
    models: Annotated[tuple[str, ...], "NAME"] = ()
    """Networks to train, by their names or by a family's (resnet: resnet18 to resnet152), or all; default: the one of
    --model."""


@dataclass(frozen=True)
class CompareOptions(TrainingOptions, Comparison):
    """Do the same training in fp32, TF32, fp16 and bf16, of one network or of several, and show the results side by
    side. The same command goes on where it was stopped."""


@dataclass(frozen=True)
class GpuReportOptions:
    """Measure what this GPU can do, in less than ten minutes, or set reports side by side.

    Kernels, recurrent layers, training and inference of ResNets by precision, time and cost to an accuracy:
    docs/gpu_report.md. The same command goes on where it was stopped. On a CPU, a small part of it.
    """

    compare: Annotated[tuple[Path, ...], "REPORT"] = ()
    """Measure nothing: set these reports (their folders, or report.json) side by side, with ratios to the first."""
    sections: tuple[Literal["kernels", "recurrent", "cost", "training", "inference"], ...] = (
        "kernels", "recurrent", "cost", "training", "inference",
    )
    """What to measure, in this order; what the report in --output has already is kept."""
    data: Annotated[str, "PATH"] = ""
    """CIFAR-10, in any form of docs/data.md, for the section cost; without it, that is left out on a GPU."""
    target_accuracy: float = 0.0
    """Top-1 that time and cost are counted to, a fraction; 0: 0.88 on CIFAR-10."""
    price_per_hour: float = 0.0
    """What an hour of this machine costs, in any currency; 0: not known."""
    minutes: float = 9.0
    """For all sections together; what would begin later is left out, and measured when the command is repeated. What
    has begun is finished, which takes up to half a minute more, on a CPU a minute or two."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """What to measure; auto: the GPU if there is one that the executor can use."""
    output: Annotated[str, "FOLDER"] = ""
    """Folder of the report; default: runs/gpu_report, or runs/gpu_comparison."""


@dataclass(frozen=True)
class PredictOptions(LoaderOptions):
    """Print the most likely classes of image files, or write those of any number of them to a file."""

    images: tuple[Path, ...]
    """Image files; folders, which stand for all images in them and in the folders within; .txt files that list image
    files, one a line; - for such a list on standard input."""
    checkpoint: Annotated[str, "PATH"] = ""
    """Run folder, checkpoint or weights of another program (docs/fine_tuning.md); of a run folder, its best
    checkpoint."""
    output: Annotated[str, "FILE"] = ""
    """Write the predictions to this file instead, batch by batch: .csv, or .jsonl for a line of JSON each
    (docs/inference.md). The same command goes on where the file ends. An image that cannot be read gets the reason in
    place of classes, unless --on-bad-image error is given."""
    top: int = 5
    """How many classes to give for each image."""
    json: bool = False
    """Print JSON instead of a table."""
    contact_sheet: Annotated[str, "FILE"] = ""
    """Also write a PNG with the images, as the network sees them, and their predictions."""
    batch_size: int = 32
    """Images in one forward pass; with --output on a GPU 256, where it is not given."""
    int8: bool = False
    """Predict with the network in INT8 that `quantize` has made of it: on the CPU, with --device gpu on a GPU."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """Where to compute, as in training."""
    executor: Literal["auto", "mxnet", "reference", "cuda"] = "auto"
    """What computes, as in training."""


@dataclass(frozen=True)
class ExportOptions:
    """Write a trained network as ONNX, PyTorch or MXNet files, or a network's Symbol."""

    checkpoint: Annotated[str, "PATH"] = ""
    """Run folder, checkpoint or weights of another program (docs/fine_tuning.md); of a run folder, its best
    checkpoint."""
    onnx: Annotated[str, "FILE"] = ""
    """ONNX file to write: input `data` float32 (N, 3, H, W), RGB, output `probabilities` (N, classes), BatchNorm folded
    into the convolutions; checked with ONNX Runtime. Its metadata says how to prepare an image (docs/inference.md)."""
    int8: Literal["none", "onnxruntime", "tensorrt"] = "none"
    """Write the network in INT8 that `quantize` has made to --onnx, in the QDQ form (QuantizeLinear, DequantizeLinear):
    as ONNX Runtime computes it on CPUs with integers, or with symmetric int8, as TensorRT takes it."""
    symbol: Annotated[str, "FILE"] = ""
    """Symbol JSON file to write: the network for `python -m graph_passes show --symbol` and for MXNet to load."""
    params: Annotated[str, "FILE"] = ""
    """MXNet parameter file to write, for the Symbol of the same --layout."""
    torchvision: Annotated[str, "FILE"] = ""
    """.pth or .safetensors file to write: a state_dict that torchvision's or timm's network of that name loads; beside
    it, in FILE's name with .json, how images are prepared and what the classes are called, in the form of timm."""
    layout: Literal["NHWC", "NCHW"] = "NHWC"
    """Memory layout of --symbol and --params; stock MXNet on a CPU needs NCHW."""
    model: Annotated[str, "NAME"] = "resnet50"
    """Network for --symbol without a checkpoint, as in `train`."""
    num_classes: int = 1000
    """Its number of classes."""
    overwrite: bool = False
    """Replace files that are there already."""


# Of the options that `train` has not.
LIMITS: dict[str, Limit] = {
    **language_model.LIMITS,
    **dict.fromkeys(("min_steps", "limit_steps", "top"), AT_LEAST_1),
    "batch_sizes": (lambda value: min(value, default=1) >= 1, "at least 1 each"),
    **dict.fromkeys(("limit_minutes", "minutes"), ABOVE_0),
    "warmup_steps": NOT_NEGATIVE,
}

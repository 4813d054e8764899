"""The options of each command except `train`, whose options are in `config.Config`. Imports nothing slow."""

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
from train.options.run import (
    DeviceOptions,
    DistributedOptions,
    LogOptions,
    PluginOptions,
    RunOptions,
    StartOptions,
)
from train.options.training import TrainingOptions


@dataclass(frozen=True)
class ValidateOptions(LoaderOptions, InferenceImageOptions, BatchOptions, DeviceOptions, DataOptions, PluginOptions,
                      StartOptions):
    """Print loss and accuracy of a trained network on validation data.

    Options that are not given keep their values from the run that trained the network.
    """

    checkpoint: Annotated[str, "PATH"] = ""
    """Network to validate: a run folder (its best checkpoint is used), a checkpoint, or weights of another program
    (docs/fine_tuning.md)."""
    int8: bool = False
    """Validate the INT8 network that `quantize` has made of it. It runs on the CPU, or on a GPU with --device gpu."""
    report: Annotated[str, "FOLDER"] = ""
    """Also write a report into this new folder: confusions, accuracy by class, the surest mistakes, calibration."""
    output_: Annotated[str, "FILE"] = ""
    """Also write a record of each image to this new file: its true class, its five most likely ones and its loss; .csv,
    or .jsonl with one JSON object per line (docs/inference.md)."""


@dataclass(frozen=True)
class QuantizeOptions(LoaderOptions, InferenceImageOptions, BatchOptions, DataOptions, PluginOptions, StartOptions):
    """Quantise a trained network to INT8, and print what that costs in accuracy.

    Convolutions then compute with 8-bit integers. Their ranges come from training images. The result is written beside
    the checkpoint. Options that are not given keep their values from the run that trained the network. Runs on the CPU.
    """

    checkpoint: Annotated[str, "PATH"] = ""
    """Network to quantise: a run folder (its best checkpoint is used), a checkpoint, or weights of another program
    (docs/fine_tuning.md)."""
    calibration: Literal["max", "percentile", "entropy"] = "entropy"
    """How to find the range of a tensor. max: its largest absolute value; percentile: the value that 0.01 % exceed;
    entropy: the value that best keeps the distribution (Kullback-Leibler divergence, as in TensorRT)."""
    images: int = 512
    """Number of training images that determine the ranges; default: 512, or all if the data has fewer."""
    float_first: bool = False
    """Keep the first convolution, which reads the images, in floats."""
    int8_classifier: bool = False
    """Compute the classifier in INT8 too."""
    overwrite: bool = False
    """Replace an existing INT8 network of these weights."""


@dataclass(frozen=True)
class Measurement:
    """The measurement."""

    warmup_steps: int = 10
    """Steps at the start that are not measured."""
    min_steps: int = 20
    """Minimum number of measured steps."""
    limit_steps: int = 1000
    """Maximum number of measured steps, even if the median is still uncertain."""
    limit_minutes: float = 5.0
    """Maximum duration in minutes, even if the median is still uncertain."""
    profile: bool = False
    """Executor cuda: also measure each operator of the step. The profile is printed, and written to profile.txt in the
    run folder."""
    inference: bool = False
    """Measure inference instead: images/sec, latency, memory and energy by batch size, in all of the executor's
    precisions or in that of --dtype (docs/inference.md). The results are printed, and written as JSON and as a plot.
    Images are generated; the default network is ResNet-50 with 1,000 classes at 224 pixels."""
    int8: bool = False
    """With --inference: measure INT8, on a GPU only."""
    batch_sizes: Annotated[tuple[int, ...], "N"] = ()
    """With --inference: the batch sizes. Default: powers of two from 1 to 2,048 as far as memory allows, on a CPU to
    16."""


@dataclass(frozen=True)
class BenchmarkOptions(LogOptions, DistributedOptions, OptimizerOptions, CacheOptions, LoaderOptions, ImageOptions,
                       BatchOptions, DroppingOptions, NetworkOptions, DeviceOptions, DataOptions, PluginOptions,
                       RunOptions, Measurement):
    """Measure the speed of training steps, repeated until it is known to 1 %, or of inference."""


@dataclass(frozen=True)
class Comparison:
    """The comparison."""

    precisions: tuple[Literal["float32", "tf32", "float16", "bfloat16"], ...] = (
        "float32", "tf32", "float16", "bfloat16",
    )
    """Precisions to train in; a CPU has only float32."""
    models: Annotated[tuple[str, ...], "NAME"] = ()
    """Networks to train: names, families (resnet: resnet18 to resnet152), or all; default: the one of --model."""


@dataclass(frozen=True)
class CompareOptions(TrainingOptions, Comparison):
    """Train one network or several in fp32, TF32, fp16 and bf16, and show the results side by side. After an
    interruption the same command resumes."""


@dataclass(frozen=True)
class GpuReportOptions:
    """Measure this GPU in less than ten minutes, or set reports side by side.

    Measured are kernels, recurrent layers, training and inference of ResNets by precision, and time and cost to an
    accuracy (docs/gpu_report.md). After an interruption the same command resumes. A CPU gets a small part of it.
    """

    compare: Annotated[tuple[Path, ...], "REPORT"] = ()
    """Measure nothing, but set these reports (folders or report.json) side by side, with ratios to the first."""
    sections: tuple[Literal["kernels", "recurrent", "cost", "training", "inference"], ...] = (
        "kernels", "recurrent", "cost", "training", "inference",
    )
    """Sections to measure, in this order. Sections that the report in --output already has are kept."""
    data: Annotated[str, "PATH"] = ""
    """CIFAR-10, in any form of docs/data.md, for the section cost. Without it a GPU's report has no section cost."""
    target_accuracy: float = 0.0
    """Top-1 accuracy (fraction) to which time and cost are counted; 0: 0.88 on CIFAR-10."""
    price_per_hour: float = 0.0
    """Price of an hour of this machine, in any currency; 0: unknown."""
    minutes: float = 9.0
    """Time for all sections together. Measurements that would begin later are left out, and done when the command is
    repeated. One that has begun is finished, which takes up to half a minute, on a CPU a minute or two."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """Device to measure; auto: the GPU if there is one that the executor can use."""
    output: Annotated[str, "FOLDER"] = ""
    """Folder of the report; default: runs/gpu_report, or runs/gpu_comparison."""


@dataclass(frozen=True, kw_only=True)
class InferenceOptions(LoaderOptions, PluginOptions, StartOptions):
    """The network."""

    checkpoint: Annotated[str, "PATH"] = ""
    """Network to compute with: a run folder (its best checkpoint is used), a checkpoint, or weights of another program
    (docs/fine_tuning.md)."""
    batch_size: int = 32
    """Images per forward pass; default of predict --output and of embed on a GPU: 256."""
    int8: bool = False
    """Compute with the INT8 network that `quantize` has made of it. It runs on the CPU, or on a GPU with --device
    gpu."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """Device, as in training."""
    executor: Literal["auto", "mxnet", "reference", "cuda"] = "auto"
    """Executor, as in training."""


@dataclass(frozen=True)
class PredictOptions(InferenceOptions):
    """Print the most likely classes of image files, or write them to a file for any number of images."""

    images: tuple[Path, ...]
    """Images: files; folders, for all images in them and their subfolders; .txt files that list image files, one per
    line; - for a list on standard input."""
    output: Annotated[str, "FILE"] = ""
    """Write the predictions to this file instead, batch by batch: .csv, or .jsonl with one JSON object per line
    (docs/inference.md). The same command resumes at the end of the file. An image that cannot be read gets the reason
    instead of classes, unless --on-bad-image error is given."""
    top: int = 5
    """Number of classes to show for each image."""
    json: bool = False
    """Print JSON instead of a table."""
    contact_sheet: Annotated[str, "FILE"] = ""
    """Also write a PNG of the images as the network sees them, with their predictions."""


@dataclass(frozen=True)
class EmbedOptions(InferenceOptions):
    """Write the features of images, which the network's classifier reads, to a NumPy file."""

    images: tuple[Path, ...]
    """Images: files; folders, for all images in them and their subfolders; .txt files that list image files, one per
    line; - for a list on standard input."""
    output: Annotated[str, "FILE"] = ""
    """.npy file to write: float32 (images, features). A .txt file of the same name beside it lists the image files, one
    per line, in the order of the rows. An image that cannot be read is left out of both with --on-bad-image skip."""
    overwrite: bool = False
    """Replace existing files."""


@dataclass(frozen=True)
class ExportOptions(PluginOptions, StartOptions):
    """Write a trained network as ONNX, PyTorch or MXNet files, or a network's Symbol."""

    checkpoint: Annotated[str, "PATH"] = ""
    """Network to export: a run folder (its best checkpoint is used), a checkpoint, or weights of another program
    (docs/fine_tuning.md)."""
    onnx: Annotated[str, "FILE"] = ""
    """ONNX file to write, checked with ONNX Runtime: input `data` float32 (N, 3, H, W), RGB, output `probabilities` (N,
    classes), BatchNorm folded into the convolutions. Its metadata says how to prepare an image (docs/inference.md)."""
    features: bool = False
    """Write the network to --onnx without its classifier: output `features` (N, C), what the classifier would read."""
    int8: Literal["none", "onnxruntime", "tensorrt"] = "none"
    """Write the INT8 network of `quantize` to --onnx, in the QDQ form (QuantizeLinear, DequantizeLinear). onnxruntime:
    for integer arithmetic on CPUs; tensorrt: with symmetric int8, as TensorRT requires."""
    symbol: Annotated[str, "FILE"] = ""
    """Symbol JSON file to write, for MXNet and for `python -m graph_passes show --symbol`."""
    params: Annotated[str, "FILE"] = ""
    """MXNet parameter file to write, for the Symbol with an equal --layout."""
    torchvision: Annotated[str, "FILE"] = ""
    """.pth or .safetensors file to write: a state_dict for torchvision's or timm's network of that name. A JSON file of
    the same name beside it, in timm's form, says how images are prepared and what the classes are called."""
    layout: Literal["NHWC", "NCHW"] = "NHWC"
    """Memory layout of --symbol and --params; stock MXNet on a CPU needs NCHW."""
    model: Annotated[str, "NAME"] = "resnet50"
    """Network for --symbol without a checkpoint, as in `train`."""
    num_classes: int = 1000
    """Number of classes of that network."""
    overwrite: bool = False
    """Replace existing files."""


# Limits of the options that `train` does not have.
LIMITS: dict[str, Limit] = {
    **language_model.LIMITS,
    **dict.fromkeys(("min_steps", "limit_steps", "top"), AT_LEAST_1),
    "batch_sizes": (lambda value: min(value, default=1) >= 1, "at least 1 each"),
    **dict.fromkeys(("limit_minutes", "minutes"), ABOVE_0),
    "warmup_steps": NOT_NEGATIVE,
}

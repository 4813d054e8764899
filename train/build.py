"""Builds the parts of a run from its configuration: the loaders, and the network on its executor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import psutil

import pipelines
from common.command_line import option_name
from common.phases import DATA, NETWORK, phase
from graph_passes import Graph, GraphError, Ref, passes
from graph_passes.errors import CapacityError
from graph_passes.executors import Executor, create_executor
from graph_passes.passes.freeze import BACKBONE
from pipelines import Loader, LoaderConfig
from pipelines.options import SAMPLES
from pipelines.samples import SAMPLES_FOLDER, make_samples
from pipelines.sources import Classes, splits_of
from pipelines.sources.base import SPLITS
from train import devices, losses, models
from train.checkpoint import Checkpoint
from train.classes import match, padded, some
from train.config import Config, configure
from train.devices import Placement
from train.errors import TrainError
from train.models.network import Network
from train.options.data import SYNTHETIC, LoaderOptions
from train.options.optimizer import BCE, SOFTMAX
from train.processes import topology
from train.processes.distributed import Workers, is_elastic
from train.recording.metrics import TRAINING_IMAGES, VALIDATION
from train.schedule import image_sizes
from train.weights.int8_file import Int8Network, executor_of

if TYPE_CHECKING:
    from graph_passes.executors.cuda.statistics_group import StatisticsGroup

# MXNet's memory for a training step on the CPU, divided by our planner's estimate for the same graph. Measured with
# ResNet-50 at 224 pixels (batch 2, 8 and 16): a ratio of 1.17 for each further image, plus half a GiB.
MXNET_MEMORY = 1.15
# MXNet's memory divided by the planner's estimate, for inference. Measured: 1.7 to 2.0 (ResNet-18 and 50, from 4 images
# of 1024 pixels to 16 of 768).
MXNET_INFERENCE_MEMORY = 2.0
MXNET_LARGEST = 2**31  # elements of a tensor; MXNet 1.9.1 is built for tensors with fewer elements


def network_dtype(config: Config, placement: Placement) -> str:
    """The type of the network's tensors: "float16", "bfloat16" or "float32"."""
    if config.dtype != "auto":
        return config.dtype
    return "float16" if placement.executor == "cuda" else "float32"


def batch_form(config: Config, placement: Placement) -> tuple[str, Literal[3, 4]]:
    """Type and number of channels of the executor's images: "float16" or "float32"; 3, or 4 with zeros as the
    fourth."""
    # The cuda executor's first convolution reads four channels, so a batch with four is copied unchanged.
    channels: Literal[3, 4] = 4 if placement.executor == "cuda" else 3
    return "float16" if network_dtype(config, placement) == "float16" else "float32", channels


def loader_settings(options: LoaderOptions, config: Config, placement: Placement, workers: Workers) -> dict[str, Any]:
    """The LoaderConfig arguments that all loaders of a network share: the values of `options`, the format of batches,
    and the device on which they are made."""
    on_gpu = placement.device.startswith("gpu")
    dtype, channels = batch_form(config, placement)
    return {
        "transform": config.transform,
        "batch_size": config.batch_size,
        "dtype": dtype,
        "channels": channels,
        "device": "gpu" if on_gpu else "cpu",
        "device_id": workers.local_rank if on_gpu else 0,
        "num_threads": options.num_threads or topology.cores_of_process(workers.local_size),
        "hw_decoder_load": options.hw_decoder_load if options.hw_decoder_load >= 0 else None,
        "on_bad_image": options.on_bad_image,
        "max_pixels": options.max_pixels,
    }


@phase(DATA)
def open_split(config: Config, split: str, placement: Placement, workers: Workers, classes: Classes | None = None,
               whose: str = "") -> Loader:
    """The loader of this process's shard of the split "train" or "val". Raises DataError or TrainError.

    `classes`: the network's classes, if known. Labels are then indices into `classes`, and training data must have all
    of these classes. `whose` says in messages where the classes come from.
    """
    if split == "train" and config.batch_size == 1 and (config.mixup or config.cutmix):
        raise TrainError(f"{option_name('mixup' if config.mixup else 'cutmix')} mixes the images of a batch, but "
                         "--batch-size 1 has a single one: raise --batch-size, or leave out the mixing")
    options = config
    # a fixed share instead of the fastest share, because an image's pixels depend on the decoder
    if config.hw_decoder_load < 0 and config.deterministic:
        options = replace(config, hw_decoder_load=pipelines.DEFAULT_HW_DECODER_LOAD)
    loader = pipelines.open_loader(  # this call imports DALI, which a program without data does not need
        LoaderConfig(
            data=str(SAMPLES_FOLDER) if config.data == SAMPLES else config.data,
            split=split,
            val_split=config.val_split,
            val_group_by=config.val_group_by,
            first_label=config.first_label,
            labels=config.labels,
            balance=config.balance,
            repeated_augmentation=config.repeated_augmentation,
            image_size=config.image_size if split == "train" else config.inference_image_size,
            image_sizes=image_sizes(config),
            seed=config.seed,
            cache_gib=config.cache if config.cache >= 0 else None,
            num_classes=config.num_classes or None,
            **loader_settings(options, config, placement, workers),
        ),
        shard=(workers.rank, workers.size),
    )
    if split == "train" and len(met := list(itertools.islice(loader.labels_met(), 2))) == 1:
        raise _one_class(config.data, loader.classes[met[0]][0])
    num_classes = max(len(classes or loader.classes), config.num_classes)
    if split == "train" and config.label_smoothing >= (most := 1 - 1 / num_classes):
        raise TrainError(f"--label-smoothing {config.label_smoothing:g} gives the right class no larger "
                         f"share than a wrong one ({num_classes} classes): give less than {most:.3g}, 0.1 is usual")
    if classes is None:
        found = len(loader.classes)
        if 0 < config.num_classes < found:
            raise TrainError(f"--num-classes {config.num_classes} is less than the {found} classes of {config.data}: "
                             "leave it out, or raise it")
        loader.count_classes_as(padded(loader.classes, config.num_classes), loader.labels)
        return loader
    first_of_data, first_of_network = (int(each.first_label == "1") for each in (loader.config, config))
    matched = match(config.data, loader.classes, classes, whose, is_whole=split == "train", met=loader.labels_met,
                    place=loader.place, first_labels=(first_of_data, first_of_network))
    loader.count_classes_as(classes, matched.labels)
    if matched.note and workers.rank == 0:
        print(matched.note, flush=True)
    return loader


def open_data(values: Mapping[str, Any], split: str) -> Loader:
    """The loader of a split, for a program that is not a training run. `values`: given options of the command `train`.
    Raises UserError."""
    if split not in SPLITS:
        raise TrainError(f"there is no split {split!r}: give {' or '.join(map(repr, SPLITS))}")
    workers = Workers()
    config = configure(values, devices.default_config(values, workers.local_rank))
    if config.data == SAMPLES:
        make_samples(SAMPLES_FOLDER)
    return open_split(config, split, devices.choose(config, workers.local_rank), workers)


def evaluated_images(config: Config) -> str:
    """Which images validation uses: one of the words in `metrics.EVALUATED`. Raises DataError without any data."""
    has_own = config.val_split or config.data in (SAMPLES, SYNTHETIC) or "val" in splits_of(config.data)
    return VALIDATION if has_own else TRAINING_IMAGES


def class_remarks(data: str, train_loader: Loader, val_loader: Loader) -> list[str]:
    """Remarks on classes that have images in only one of the two splits, or in none."""
    classes = train_loader.classes
    in_train, in_val = (_met(loader, set(train_loader.labels)) for loader in (train_loader, val_loader))
    remarks = []
    if unseen := sorted(in_train - in_val):
        only = f" (all of it is {classes[min(in_val)][1]!r})" if len(in_val) == 1 else ""
        remarks.append(f"{data}: no image for validation is of these classes, so accuracy says nothing about them: "
                       f"{some([classes[label] for label in unseen])}{only}")
    if untrained := sorted(in_val - in_train):
        remarks.append(f"{data}: images for validation are of classes that no training image has: "
                       f"{some([classes[label] for label in untrained])}")
    # Classes that are only padding have their index as name.
    listed = {label for label, (_, name) in enumerate(classes) if name != str(label)}
    if unused := sorted(listed - in_train - in_val):
        remarks.append(f"{data}: no image is of these classes, which only the list of classes has: "
                       f"{some([classes[label] for label in unused])}")
    return remarks


def _met(loader: Loader, wanted: set[int]) -> set[int]:
    """The wanted classes that occur in a split. Reads images until all wanted classes are found."""
    met: set[int] = set()
    for label in loader.labels_met():
        met.add(loader.labels[label])
        if met >= wanted:
            break
    return met


def _one_class(data: str, name: str) -> TrainError:
    inside = Path(data) / name
    has_folders = inside.is_dir() and any(map(Path.is_dir, inside.iterdir()))
    way_out = (f"give {inside}, where there are folders" if has_folders else
               "give data of two or more, with a folder for each (docs/data.md)")
    return TrainError(f"{data} has images of one class only, {name!r}, so there is nothing to distinguish it from: "
                      f"{way_out}")


def join_bn_group(config: Config, placement: Placement, workers: Workers) -> StatisticsGroup | None:
    """The group of GPUs that share BatchNorm's statistics with this process's GPU (`--bn-group`); None without sharing.

    A collective operation. Raises TrainError if the group is impossible.
    """
    size = config.bn_group
    if size == 1:
        return None
    with workers.agreement():
        if placement.executor != "cuda":
            raise TrainError(f"--bn-group {size} needs the cuda executor, and this run has the {placement.executor} "
                             "executor: leave out --bn-group")
        if is_elastic():
            raise TrainError(f"--bn-group {size} does not work in elastic runs, because a lost process would break its "
                             "group: leave out --bn-group or --min-np")
        if workers.local_size % size:
            raise TrainError(f"--bn-group {size} does not divide the number of processes on this machine, "
                             f"{workers.local_size}: give a divisor of this number, or leave out --bn-group")
        from graph_passes.executors.cuda.statistics_group import StatisticsGroup

        group = StatisticsGroup(workers.local_rank)
        invitation = group.invitation
    own = workers.local_rank % size
    first = workers.rank - own  # ranks on one machine are consecutive
    invitations = workers.gather(invitation)[first : first + size]
    with workers.agreement():
        group.join(invitations, own)
    return group


def class_weights(config: Config, loader: Loader) -> list[float]:
    """The class weights of the loss (`--class-weights`), by label; an empty list if all classes weigh the same.

    `loader` reads the training images. The mean weight of these images is 1, and the loader's remarks get the range of
    the weights. A class without images has the weight 1, because label smoothing gives it a target too. Raises
    DataError.
    """
    if not config.class_weights:
        return []
    sizes = loader.class_sizes()
    weights = np.maximum(sizes, 1.0) ** -config.class_weights
    weights *= sizes.sum() / (sizes * weights).sum()
    weights[sizes == 0] = 1
    images, weigh = (f"{values.min():,.4g} to {values.max():,.4g}" for values in (sizes[sizes > 0], weights[sizes > 0]))
    remark = f"--class-weights {config.class_weights:g}: the classes have {images} images, and weigh {weigh}"
    loader.remarks = [*loader.remarks, remark]
    return weights.tolist()


def with_loss(config: Config, graph: Graph, class_weights: Sequence[float] = ()) -> Graph:
    """Set the loss of `--loss` in a network. The loss also determines how the network computes probabilities. Raises
    UserError if a plug-in's loss cannot be used for training.
    """
    if config.loss == BCE:
        return passes.binary_cross_entropy(graph, config.bce_threshold)
    if config.loss != SOFTMAX:
        return losses.use(graph, config.loss)
    return passes.weigh_classes(graph, class_weights) if class_weights else graph


def training_graph(config: Config, network: Network, class_weights: Sequence[float] = ()) -> Graph:
    """The graph for training. It has the loss of `--loss`, the marks of `--freeze` and `--backbone-lr-factor`,
    stochastic depth (per sample or per batch) and dropout. Raises TrainError for layers that cannot be frozen or
    dropped.
    """
    graph, option = with_loss(config, network.graph, class_weights), ""
    try:
        if config.freeze:
            option = f"--freeze {config.freeze}"
            graph = passes.freeze(graph, config.freeze)
        if config.stochastic_depth:
            option = f"--stochastic-depth {config.stochastic_depth:g}"
            graph = passes.stochastic_depth(graph, config.stochastic_depth, config.stochastic_depth_mode)
    except GraphError as error:
        raise TrainError(f"{option}, of {network.name}: {error}", on_all_ranks=True) from None
    if config.backbone_lr_factor != 1:
        if config.freeze == BACKBONE:
            raise TrainError(f"--backbone-lr-factor {config.backbone_lr_factor:g} has no effect with --freeze "
                             f"{BACKBONE}, which trains nothing of the backbone: leave out one of them",
                             on_all_ranks=True)
        graph = passes.slow_backbone(graph, config.backbone_lr_factor)
    return passes.dropout(graph, config.dropout)


@phase(NETWORK)
def check_memory(config: Config, num_classes: int, image_size: int, placement: Placement, training: bool = True
                 ) -> None:
    """Raise CapacityError if this machine's memory is too small for a training step, or for inference, on the CPU.
    Without this check the system would kill the process silently. The cuda executor checks its memory itself. Raises
    TrainError if the network cannot read images of this size.
    """
    network = models.create(config.model, num_classes, config.label_smoothing, config.image_size)
    network.check_image_size(image_size)
    if placement.executor != "mxnet" or not placement.device.startswith("cpu"):
        return
    graph, factor, option = network.graph, MXNET_INFERENCE_MEMORY, "--val-image-size"
    shapes = {"data": (config.batch_size, image_size, image_size, 3), "softmax_label": (config.batch_size,)}
    if training:
        graph = passes.draw_masks(training_graph(config, network), config.batch_size)
        graph, factor, option = passes.gradient_add(passes.gradient(graph, shapes)), MXNET_MEMORY, "--image-size"
    needed, free = factor * passes.memory(graph, shapes).arena_bytes, psutil.virtual_memory().available
    excess = max(needed / free, max(map(math.prod, graph.infer_shapes(shapes).values())) / (MXNET_LARGEST - 1))
    if excess > 1:
        largest = int(0.8 * config.batch_size / excess)
        advice = f"use a --batch-size of at most {largest}" if largest else f"free memory, or use a smaller {option}"
        what = f"about {needed / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} GiB are free" if needed > free else (
            "a tensor of more than 2^31 elements, which MXNet does not support")
        raise CapacityError(
            f"{'training' if training else 'inference'} on batches of {config.batch_size} images of "
            f"{image_size}x{image_size} needs {what}: {advice}"
        )


@phase(NETWORK)
def build_executor(
    config: Config,
    num_classes: int,
    image_size: int,
    placement: Placement,
    checkpoint: Checkpoint | None,
    all_reduce: bool = False,
    bn_group: StatisticsGroup | None = None,
    largest_image_size: int = 0,
    class_weights: Sequence[float] = (),
    answer: Ref | None = None,
) -> Executor:
    """Build the network with the parameters of `checkpoint`, or with initial parameters. Raises GraphError or
    TrainError.

    `image_size`: size of the first batches, in pixels; the executor is built again when the first batch of another size
    comes. `all_reduce`: the gradients will be averaged with other processes. `bn_group`: see `join_bn_group`.
    `largest_image_size`: the largest size of training images to come, for which the cuda executor reserves memory now.
    `class_weights`: see the function `class_weights`. `answer`: the tensor that inference returns, for the cuda
    executor only.
    """
    network = models.create(config.model, num_classes, config.label_smoothing, config.image_size)
    network.check_image_size(image_size)
    if checkpoint is None:
        params, aux = network.initial_values(config.seed, zero_init_residual=config.zero_init_residual)
    else:
        if checkpoint.network != str(network):
            raise TrainError(f"{checkpoint.named} holds a {checkpoint.network}, but this run needs a {network}: give "
                             "the --data and --model that it was trained with")
        params, aux = checkpoint.params, checkpoint.aux
    data_shape = (config.batch_size, image_size, image_size, 3)
    shapes = {"data": data_shape, "softmax_label": data_shape[:1]}
    options: dict[str, Any] = {}
    if placement.executor == "cuda":
        dtype = network_dtype(config, placement)
        options = {"dtype": dtype, "tf32": config.tf32, "deterministic": config.deterministic, "group": bn_group,
                   "largest_image_size": largest_image_size, "answer": answer}
        if all_reduce:
            # Horovod's MXNet library does not support bfloat16.
            wide = config.wire_dtype == "float32" or dtype == "bfloat16"
            options |= {"num_buckets": config.buckets, "wire_dtype": "float32" if wide else None}
    graph = training_graph(config, network, class_weights)
    executor = create_executor(placement.executor, graph, shapes, placement.device, **options)
    executor.set_params(params, aux)
    return executor


@phase(NETWORK)
def inference_executor(trained: Checkpoint, int8: Int8Network | None, config: Config, placement: Placement) -> Executor:
    """The executor of a trained network for images of `config.inference_image_size`; in INT8 if `int8` is given. Raises
    GraphError or TrainError."""
    if int8:
        return executor_of(int8, trained, config, placement)
    check_memory(config, trained.num_classes, config.inference_image_size, placement, training=False)
    return build_executor(config, trained.num_classes, config.inference_image_size, placement, trained)

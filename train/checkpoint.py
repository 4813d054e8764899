"""Checkpoints, written atomically.

A checkpoint is a NumPy .npz file: a zip of .npy arrays. Each array has a CRC-32, so truncation and damage are detected.
The file contains no pickled objects and can be read with `numpy.load`. A further member, meta.json, holds everything
else:

    params/<name>, aux/<name>    canonical: fp32, convolution weights OHWI
    state/<slot>/<name>          the optimizer's state, such as the momentum, canonical
    averages/<name>              `ema`: moving averages of params and aux, canonical, if the run keeps them
    biased/aux/<name>, biased/averages/<name>
                                 in the first steps of a run: running statistics that still contain a share of their
                                 initial values, from which training resumes (`train/statistics.py`); in aux and
                                 averages that share is removed
    loader/<rank>                position in the epoch, one for each process
    outcomes/<name>              of the best validation, in best.npz: `Outcomes` of train/recording/outcomes.py
    meta.json                    format, progress, configuration, names and folders of the classes, state of NumPy's
                                 random generator, the optimizer's scalars (loss scaling, number of updates), the
                                 shares of biased statistics

Version 1 can still be read. It had momenta/<name> instead of state/momentum/<name>, and loss_scaling instead of
scalars.

The learning rate is a function of the step, so the schedule needs no state.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from common import plugins
from common.files import replacing, way_out
from common.phases import WEIGHTS, phase
from pipelines.sources import Classes
from train import models
from train.config import Config
from train.content import content_of_file
from train.errors import TrainError
from train.language_model_config import LanguageModelConfig
from train.models.network import Shapes
from train.options.language_model import LANGUAGE_MODEL
from train.options.optimizer import LOSSES, SOFTMAX

FORMAT = "resnet checkpoint"
VERSION = 2
READ = (1, 2)  # format versions that can be read
FOLDER = "checkpoints"  # inside the run folder
BEST = "best.npz"
META = "meta.json"
OUTCOMES = "outcomes"  # group of the arrays in the file
OF_INT8 = "meta.npy"  # the metadata member of weights/int8_file.py, by which such a file is recognised

Arrays = dict[str, np.ndarray]


@dataclass
class Progress:
    """The progress of a run."""

    step: int = 0  # optimizer steps done
    epoch: int = 0  # epochs completed, validation included
    epoch_step: int = 0  # optimizer steps done in the current epoch
    best_top1: float = -1.0  # best validation accuracy so far, a fraction; -1 before the first validation
    validations_since_best: int = 0


@dataclass(frozen=True)
class Biased:
    """Running statistics, and their moving averages, that still contain a share of their initial values; also the
    shares. Training resumes from these biased values (`train/statistics.py`).
    """

    aux: Arrays = field(default_factory=dict)
    averages: Arrays = field(default_factory=dict)
    aux_shares: dict[str, float] = field(default_factory=dict)
    average_shares: dict[str, float] = field(default_factory=dict)

    @property
    def shares(self) -> dict[str, dict[str, float]]:
        """The shares, each by the name of its group in the file."""
        return {"aux": self.aux_shares, "averages": self.average_shares}


@dataclass
class Checkpoint:
    params: Arrays
    aux: Arrays  # running statistics from which the share of the initial values has been removed
    state: dict[str, Arrays]  # slot -> the optimizer's arrays
    config: Config
    class_names: list[str]  # names for display
    class_keys: list[str] = field(default_factory=list)  # folders or synsets; empty if unknown
    progress: Progress = field(default_factory=Progress)
    ema: Arrays = field(default_factory=dict)  # moving averages of params and aux; empty if the run keeps none
    biased: Biased = field(default_factory=Biased)
    loader_states: list[bytes] = field(default_factory=list)  # one state per process, indexed by rank
    numpy_rng: dict[str, Any] = field(default_factory=dict)
    scalars: dict[str, float] = field(default_factory=dict)  # the optimizer's scalars
    # outcomes of the checkpoint's validation; empty unless it is the best checkpoint
    outcomes: Arrays = field(default_factory=dict)
    file: Path | None = None  # the file from which the checkpoint was read; None: only in memory

    @property
    def named(self) -> str:
        """The checkpoint's name in messages."""
        return f"the checkpoint {self.file or 'in memory'}"

    @cached_property
    def num_classes(self) -> int:
        return models.num_classes(self.config.model, self.params)

    @property
    def classes(self) -> Classes:
        """(folder or synset, name) of each class, in the network's order."""
        return list(zip(self.class_keys or self.class_names, self.class_names, strict=True))

    @property
    def is_at_limit(self) -> bool:
        """Whether the run has reached its --max-steps."""
        return 0 < self.config.max_steps <= self.progress.step

    @property
    def network(self) -> str:
        """The network's name in messages."""
        return f"{self.config.model} with {self.num_classes} classes"


def save(checkpoint: Checkpoint, path: Path) -> None:
    """Write `path` atomically: after a crash or on a full disk it is either complete or unchanged.

    Raises TrainError if the file cannot be written.
    """
    meta = {
        "format": FORMAT,
        "version": VERSION,
        "progress": asdict(checkpoint.progress),
        "config": checkpoint.config.to_dict(),
        "class_names": checkpoint.class_names,
        "class_keys": checkpoint.class_keys,
        "numpy_rng": checkpoint.numpy_rng,
        "scalars": checkpoint.scalars,
        "shares": checkpoint.biased.shares,
    }
    with _replacing(path) as part, part.open("wb") as file:
        with zipfile.ZipFile(file, "w") as archive:
            slots = {f"state/{slot}": arrays for slot, arrays in checkpoint.state.items()}
            groups = {"params": checkpoint.params, "aux": checkpoint.aux, **slots, "averages": checkpoint.ema,
                      "biased/aux": checkpoint.biased.aux, "biased/averages": checkpoint.biased.averages,
                      OUTCOMES: checkpoint.outcomes}
            for group, arrays in groups.items():
                for name, array in arrays.items():
                    _write_array(archive, f"{group}/{name}", array)
            for rank, state in enumerate(checkpoint.loader_states):
                _write_array(archive, f"loader/{rank}", np.frombuffer(state, np.uint8))
            archive.writestr(zipfile.ZipInfo(META), json.dumps(meta, default=np.ndarray.tolist))
        file.flush()
        os.fsync(file.fileno())


def load(path: Path) -> Checkpoint:
    """Read and verify a checkpoint. Raises TrainError if the file is missing, truncated or damaged, or belongs to
    another program.
    """
    groups: dict[str, Arrays] = {"params": {}, "aux": {}, "averages": {}, "loader": {}}
    try:
        with (content_of_file(lambda reason: f"{path} is not a complete checkpoint ({reason}); use another checkpoint "
                                             "in its folder"), zipfile.ZipFile(path) as archive):
            names = archive.namelist()
            meta = json.loads(archive.read(META)) if META in names else {}
            if OF_INT8 in names:
                raise TrainError(f"{path} is a network in INT8, made by quantize from a checkpoint: give the "
                                 "checkpoint, or its run folder, with --int8 to compute in INT8")
            if not isinstance(meta, dict) or meta.get("format") != FORMAT:
                raise TrainError(f"{path} is not a checkpoint of this program; give a file from a run's {FOLDER}/ "
                                 "folder")
            if meta["version"] not in READ:
                raise TrainError(f"{path} has checkpoint version {meta['version']}, but this program reads "
                                 f"{' and '.join(map(str, READ))}: use the version of this program that wrote it")
            for member in names:
                group, _, name = member.removesuffix(".npy").rpartition("/")
                if group:
                    array = np.lib.format.read_array(io.BytesIO(archive.read(member)), allow_pickle=False)
                    group = "state/momentum" if group == "momenta" else group  # format version 1 wrote momenta/<name>
                    groups.setdefault(group, {})[name] = array
            loader = groups["loader"]
            return Checkpoint(
                params=groups["params"],
                aux=groups["aux"],
                state={group.removeprefix("state/"): groups[group] for group in groups if group.startswith("state/")},
                ema=groups["averages"],
                biased=_biased(groups, meta.get("shares", {})),
                config=(config := _config(meta["config"], path)),
                class_names=_names(meta, "class_names") or _numbers(config.model, groups["params"]),
                class_keys=_names(meta, "class_keys"),
                progress=_progress(meta["progress"]),
                loader_states=[loader[str(rank)].tobytes() for rank in range(len(loader))],
                numpy_rng=meta["numpy_rng"],
                scalars=_scalars(meta["scalars"] if "scalars" in meta else meta.get("loss_scaling", {})),
                outcomes=groups.get(OUTCOMES, {}),
                file=path,
            )
    except OSError as error:
        raise TrainError(f"cannot read the checkpoint {path}: {error.strerror or error}") from None


def read_outcomes(path: Path) -> tuple[Progress, Arrays] | None:
    """A checkpoint's progress and the outcomes of its validation, without reading the weights. None if the file is
    missing, unreadable, or has no outcomes."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = [name for name in archive.namelist() if name.startswith(f"{OUTCOMES}/")]
            arrays = {name.removeprefix(f"{OUTCOMES}/").removesuffix(".npy"): np.lib.format.read_array(
                io.BytesIO(archive.read(name)), allow_pickle=False) for name in members}
            return (_progress(json.loads(archive.read(META))["progress"]), arrays) if arrays else None
    except Exception:  # any exception: see `content_of_file`
        return None


@phase(WEIGHTS)
def load_checked(path: Path) -> Checkpoint:
    """Like `load`, but also checks that the arrays match the network and are finite. Raises TrainError."""
    checkpoint = load(path)
    if isinstance(checkpoint.config, LanguageModelConfig):
        raise TrainError(f"{path} belongs to a language model, not to a network for images: give another "
                         "checkpoint, or resume the language model with python -m train language-model --resume")
    try:
        config = checkpoint.config
        network = models.create(config.model, checkpoint.num_classes, images=config.image_size)
    except KeyError as error:
        raise TrainError(f"{path} has no array {error}, which its {checkpoint.config.model} needs; use another "
                         "checkpoint in its folder") from None
    except TypeError:
        raise TrainError(f"{path} holds no {checkpoint.config.model}: its classifier is a single value; use another "
                         "checkpoint in its folder") from None
    params, aux = network.shapes()
    _check_arrays(path, str(network), checkpoint.params, params)
    _check_arrays(path, str(network), checkpoint.aux, aux)
    if checkpoint.ema:
        _check_arrays(path, str(network), checkpoint.ema, params | aux)
    for arrays, known in (*((arrays, params) for arrays in checkpoint.state.values()),
                          (checkpoint.biased.aux, aux), (checkpoint.biased.averages, aux)):
        _check_arrays(path, str(network), arrays, {name: known[name] for name in arrays if name in known})
    for names in (checkpoint.class_names, checkpoint.class_keys):
        if names and len(names) != network.num_classes:
            raise TrainError(f"{path} holds a {network}, but names {len(names)} classes; use another checkpoint in its "
                             "folder")
    return checkpoint


def _check_arrays(path: Path, network: str, arrays: Arrays, shapes: Shapes) -> None:
    """Raise TrainError unless the arrays have the network's names, types and shapes, and valid values."""
    for name in sorted(arrays.keys() ^ shapes.keys()):
        fault = "is missing" if name in shapes else "is not one of its arrays"
        raise TrainError(f"{path} holds no {network}: {name} {fault}; use another checkpoint in its folder")
    for name, array in arrays.items():
        if array.shape != shapes[name] or array.dtype.kind != "f":
            raise TrainError(f"{path} holds no {network}: {name} is {array.dtype} {array.shape} there, and "
                             f"float32 {shapes[name]} in the network; use another checkpoint in its folder")
        if not np.isfinite(array).all():
            raise TrainError(f"{path} cannot be used: its {name} has values that are not finite; use an earlier "
                             "checkpoint in its folder, or train anew with a lower --learning-rate")
        if name.endswith("_var") and array.min(initial=0) < 0:
            raise TrainError(f"{path} cannot be used: its {name} holds a negative variance; use an earlier "
                             "checkpoint in its folder")


def load_trained(place: str) -> Checkpoint:
    """The network to validate, predict with or export: the best of a run folder, or the network in a checkpoint file.
    `params` and `aux` of the result are moving averages if the run keeps moving averages. Raises TrainError, like
    `find` and `load_checked`.
    """
    trained = load_checked(find(place, prefer_best=True))
    if not trained.ema:
        return trained
    params, aux = ({name: trained.ema[name] for name in arrays} for arrays in (trained.params, trained.aux))
    return replace(trained, params=params, aux=aux, ema={})


def find(place: str, prefer_best: bool = False) -> Path:
    """The checkpoint file at `place`: the file itself, or the newest (or best) checkpoint of a run folder.

    Raises TrainError if there is none.
    """
    path = Path(place)
    if path.is_file():
        return path
    if not path.is_dir():
        raise TrainError(f"there is no checkpoint or run folder {place}: give the folder of a run, or a file in its "
                         f"{FOLDER}/ folder")
    found = in_folder(path, prefer_best)
    if not found:
        raise TrainError(f"{path} holds no checkpoint: train first, or give another folder or file")
    return found


def run_folder(file: Path) -> str:
    """The run folder that contains a checkpoint file; "" if the file is not in a run folder."""
    return str(file.parent.parent) if file.parent.name == FOLDER else ""


def in_folder(path: Path, prefer_best: bool = False) -> Path | None:
    """The newest (or best) checkpoint of a run folder; None if the folder has no checkpoint yet."""
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    best, found = folder / BEST, _numbered(folder)
    if not best.is_file():
        return found[-1] if found else None
    return best if prefer_best or not found or _step(best) > _step(found[-1]) else found[-1]


class _RemovedError(TrainError):
    """A checkpoint, or its folder, was removed from outside while it was written."""


class CheckpointFolder:
    """The checkpoints of one run: the newest `keep` checkpoints, named by step, and the best checkpoint, best.npz."""

    def __init__(self, run_folder: Path, keep: int) -> None:
        self.path = run_folder / FOLDER
        self.keep = keep
        self._known = self._present()  # files that exist unless somebody removes them

    def path_of(self, step: int) -> Path:
        return self.path / f"step-{step:08d}.npz"

    def save(self, checkpoint: Checkpoint, is_best: bool = False) -> None:
        """Save under the checkpoint's step, and also as best.npz if `is_best`. Raises TrainError if that fails.

        best.npz is written first. A run that is killed between the two writes resumes from best.npz (`in_folder`), so
        no run resumes with a best accuracy whose weights are not in best.npz.
        """
        try:
            self._write(checkpoint, is_best)
        except _RemovedError:
            self._write(checkpoint, is_best)
        self._known |= {self.path_of(checkpoint.progress.step).name, *[BEST] * is_best}
        for old in _numbered(self.path)[: -self.keep]:
            old.unlink(missing_ok=True)
            self._known.discard(old.name)

    def _write(self, checkpoint: Checkpoint, is_best: bool) -> None:
        path, best = self.path_of(checkpoint.progress.step), self.path / BEST
        save(checkpoint, best if is_best else path)
        if is_best:
            with _replacing(path) as part:
                try:
                    os.link(best, part)
                except OSError:  # the file system has no hard links
                    shutil.copyfile(best, part)
        # a process that was killed while writing leaves these files
        for unfinished in self.path.glob(".*.npz.partial"):
            unfinished.unlink(missing_ok=True)

    def removed(self) -> list[str]:
        """Names of the files that were removed from outside since the last call."""
        known, self._known = self._known, self._present()
        return sorted(known - self._known)

    @property
    def has_best(self) -> bool:
        return (self.path / BEST).is_file()

    def _present(self) -> set[str]:
        return {path.name for path in (*_numbered(self.path), self.path / BEST) if path.is_file()}


def _numbered(folder: Path) -> list[Path]:
    """Checkpoints by step, oldest first."""
    return sorted(folder.glob("step-*.npz"))


def _step(path: Path) -> int:
    """The optimizer step of a checkpoint file; -1 if the file cannot be read."""
    number = path.stem.removeprefix("step-")
    if number.isdigit():
        return int(number)
    try:
        with zipfile.ZipFile(path) as archive:
            return int(json.loads(archive.read(META))["progress"]["step"])
    except Exception:  # any exception: see `content_of_file`
        return -1


def _progress(values: dict[str, Any]) -> Progress:
    for name, value in values.items():
        if name != "best_top1" and not (type(value) is int and value >= 0):
            raise ValueError(f"{name} is {value!r}")
    top1 = values["best_top1"]
    # an accuracy outside 0 to 1 could never be exceeded
    if not (type(top1) in (int, float) and (top1 == -1 or 0 <= top1 <= 1)):
        raise ValueError(f"best_top1 is {top1!r}")
    progress = Progress(**values)
    if progress.epoch > progress.step:
        raise ValueError(f"epoch is {progress.epoch}, after {progress.step} steps")
    return progress


def _scalars(values: dict[str, float]) -> dict[str, float]:
    for name, value in values.items():
        least, most = (1, 2**24) if name == "loss_scale" else (0, 2**32 - 1)  # limits of these values in optimizer.cu
        if not (type(value) in (int, float) and least <= value <= most):
            raise ValueError(f"{name} is {value!r}")
    return values


def _biased(groups: dict[str, Arrays], shares: dict[str, dict[str, float]]) -> Biased:
    found = []
    for group in ("aux", "averages"):
        arrays, of_group = groups.get(f"biased/{group}", {}), shares.get(group, {})
        if arrays.keys() != of_group.keys():
            raise ValueError(f"the shares of biased/{group} are not those of its arrays")
        for name, share in of_group.items():
            if not (type(share) in (int, float) and 0 < share <= 1):
                raise ValueError(f"the share of {name} is {share!r}")
        found.append((arrays, of_group))
    (aux, aux_shares), (averages, average_shares) = found
    return Biased(aux, averages, aux_shares, average_shares)


def _names(meta: dict[str, Any], key: str) -> list[str]:
    names = meta.get(key, [])
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError(f"{key} is not a list of names")
    return names


def _numbers(model: str, params: Arrays) -> list[str]:
    """Class indices as class names, for a network without names."""
    return [str(label) for label in range(models.num_classes(model, params))]


def _config(values: dict[str, Any], path: Path) -> Config:
    """The configuration of the run. Loads the plug-ins that define the run's network and loss: the loss determines how
    scores become probabilities. Raises UserError.
    """
    kind = LanguageModelConfig if values.get("config") == LANGUAGE_MODEL else Config
    try:
        config = kind.from_dict(values)
    except TrainError as error:
        raise TrainError(f"cannot read the checkpoint {path}: {error}") from None
    loss = getattr(config, "loss", SOFTMAX)  # a language model has no option for the loss
    plugins.restore(config.plugin, str(path), run_folder(path), lambda: (
        config.model in models.OWN or plugins.has("model", config.model, config.plugin)) and (
        loss in LOSSES or plugins.has("loss", loss, config.plugin)))
    return config


def load_plugins(checkpoint: Checkpoint) -> None:
    """Load all plug-ins of a checkpoint's run; training and validation need all of them. Raises UserError."""
    file = checkpoint.file or Path()
    plugins.restore(checkpoint.config.plugin, checkpoint.named, run_folder(file))


def _write_array(archive: zipfile.ZipFile, name: str, array: np.ndarray) -> None:
    # ZipInfo sets a fixed time. The clock may show a time before 1980, which a zip file cannot store.
    with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
        np.lib.format.write_array(member, array, allow_pickle=False)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Like `replacing`, but also safe against a power cut. Creates the folder. Raises TrainError if the file cannot be
    written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            yield part
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # makes the renaming durable
        finally:
            os.close(folder)
    except OSError as error:
        advice = way_out(error, "see that its folder can be written")
        if _numbered(path.parent):
            kept, then = "; earlier ones are untouched", f"resume with --resume {path.parent.parent}"
        else:
            kept, then = ", the first one", "start again"
        kind = _RemovedError if isinstance(error, FileNotFoundError) else TrainError
        raise kind(f"cannot save the checkpoint {path} ({error.strerror or error}){kept}: {advice} and {then}"
                   ) from None

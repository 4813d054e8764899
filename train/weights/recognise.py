"""Finds the network that arrays belong to, and converts the arrays to our form.

A network fits if it has exactly these arrays, under its own names or another library's (train/models), with equal
shapes. There are two exceptions. The classifier may have any number of classes or be missing. And other libraries'
extra arrays may be present: counters, biases before a BatchNorm, and Gluon's BatchNorm of the images.
"""

from __future__ import annotations

import bisect
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from graph_passes import Graph, GraphError, roles
from graph_passes.passes.fold_bn import foldings
from train import models
from train.errors import TrainError
from train.models.blocks import BATCH_NORM_EPS
from train.models.libraries import GLUON, TORCHVISION, Published
from train.models.network import Network
from train.options.data import MIN_IMAGE_SIZE
from train.weights.record import Record

COUNTER = "num_batches_tracked"  # name of a counter in each BatchNorm of PyTorch; the counter has no effect
_STATISTICS = ("running_mean", "running_var")
# Gluon's numbered layer names, with an optional network prefix: resnetv10_stage1_conv0_weight.
_COUNTED = re.compile(r"(?:resnetv\d+_)?((?:stage\d+_)?(?:conv|batchnorm|dense)\d+)_(\w+)")

# possible height and width of the images, in pixels, for a file whose arrays depend on the size
SIZES = range(MIN_IMAGE_SIZE, 1025)
Arrays = dict[str, np.ndarray]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Found:
    """The network of the registry that was found."""

    model: str
    library: str  # library with these array names; "": this program
    prepared_by: str  # library whose preparation of images `record` holds, if no file gives it
    params: Arrays  # canonical, like `aux`
    aux: Arrays
    classifier: str  # original name of the classifier's weight, which `params` may lack
    record: Record  # how images are prepared, including properties that follow from the arrays
    num_arrays: int
    num_batches: int  # batches counted by the BatchNorms
    notes: list[str]  # remarks on arrays that were changed or ignored

    @property
    def name(self) -> str:
        """The network's name in messages."""
        return f"{self.library}'s {self.model}" if self.library == GLUON else self.model


def recognise(path: Path, arrays: Mapping[str, np.ndarray], record: Record, wanted: str = "", first: str = "",
              beside: str = "") -> Found:
    """Find the network that a file's arrays belong to, and convert the arrays.

    Args:
        path: the file, for messages.
        arrays: by the names of any library.
        record: how images are prepared.
        wanted: the required model; "": any.
        first: the model to try first; "": none. If it is the network of a file, it is the only one.
        beside: the network of a file that the arrays may belong to, like this program's own ones; "": none.

    Raises:
        TrainError: the arrays belong to no network of this program, to another one than `wanted`, or to one that would
            compute something else; or they have values that are not finite.
    """
    closest: list[tuple[_Candidate, Mapping[str, np.ndarray]]] = []
    for module, inner in _modules(arrays):
        alike = _closest(_candidates(first, beside, inner), inner, first)
        if fitting := [candidate for candidate in alike if candidate.fit(inner) == 1]:
            found = _chosen(path, fitting, wanted or record.architecture)
            taken = found.take(path, found.structural(inner), record, wanted)
            notes = [f"{module}: left out of the names, as all arrays belong to this module"] if module else []
            return replace(taken, notes=[*notes, *taken.notes])
        closest += [(candidate, inner) for candidate in alike]
    _check_beside(path, arrays)
    nearest, named = max(closest, key=lambda each: each[0].fit(each[1]))
    difference = nearest.difference(nearest.structural(named))
    if models.is_of_file(nearest.model):
        raise TrainError(f"{path} does not fit the network of the file {nearest.model}, {difference}: give weights "
                         "that were written with this network")
    raise TrainError(f"{path} belongs to no network of this program; the nearest is {nearest.model}, "
                     f"{difference}: give weights of one of its networks, which "
                     f"--model '?' lists{_or_its_own(path)}")


def _modules(arrays: Mapping[str, np.ndarray]) -> Iterator[tuple[str, Mapping[str, np.ndarray]]]:
    """Yield the arrays under their own names, and under the names inside each module to which all arrays belong. For
    example, a program for Lightning stores its network in an attribute `model`, so all names in its files begin with
    "model.".
    """
    module = ""
    yield module, arrays
    while all("." in name for name in arrays) and len(firsts := {name.partition(".")[0] for name in arrays}) == 1:
        module += f"{firsts.pop()}."
        arrays = {name.partition(".")[2]: array for name, array in arrays.items()}
        yield module, arrays


def _check_beside(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Raise TrainError if the module with the most arrays is a network, and the file has other arrays beside it."""
    firsts = Counter(name.partition(".")[0] for name in arrays if "." in name)
    module = max(firsts, key=lambda name: firsts[name], default="")
    inner = {name.partition(".")[2]: array for name, array in arrays.items() if name.startswith(f"{module}.")}
    if not 0 < len(inner) < len(arrays):
        return
    other = min(name for name in arrays if not name.startswith(f"{module}."))
    for deeper, named in _modules(inner):
        whole = f"{module}.{deeper}"
        if fits := [each.model for each in _closest(_candidates("", "", named), named, "") if each.fit(named) == 1]:
            raise TrainError(f"{path} has the arrays of {fits[0]} after {whole} and others beside it, such as {other}: "
                             f"save that module alone, with torch.save(model.{whole}state_dict(), FILE)")


def _closest(candidates: Iterator[_Candidate], arrays: Mapping[str, np.ndarray], first: str) -> list[_Candidate]:
    """Only the network `first` if the arrays fit it, otherwise the candidates that share the most names with the
    arrays.
    """
    made = []
    for candidate in candidates:
        if first in candidate.model_names and candidate.fit(arrays) == 1:
            return [candidate]
        made.append(candidate)
    shared = [candidate.shared_names(arrays) for candidate in made]
    return [candidate for candidate, share in zip(made, shared, strict=True) if share == max(shared)]


def _or_its_own(path: Path) -> str:
    """Advice for a file of MXNet's Module, whose network is in another file."""
    prefix = re.fullmatch(r"(.+)-\d{4}\.params", path.name)
    return f", or put its own network beside it, as {prefix[1]}-symbol.json" if prefix else ""


def _chosen(path: Path, fitting: Sequence[_Candidate], name: str) -> _Candidate:
    """The candidate with this name ("": not given) among the candidates that fit. Networks with equal arrays may still
    differ, for example in BatchNorm's epsilon. Raises TrainError if the name does not decide between them.
    """
    called = [candidate for candidate in fitting if name in candidate.model_names]
    differing = list(dict.fromkeys(candidate.model for candidate in fitting))
    if not called and len(differing) > 1:
        raise TrainError(f"{path} may be a {' or a '.join(differing)}, which have equal arrays but compute something "
                         f"else: name the network in {path.with_suffix('.json').name} beside it, such as "
                         f'{{"architecture": "{differing[0]}"}}')
    return (called or fitting)[0]


def _candidates(first: str, beside: str, arrays: Mapping[str, np.ndarray]) -> Iterator[_Candidate]:
    """Yield the networks whose layer names have the most in common with the file's names, each in all its forms; the
    forms of the network `first` come first. Only these networks are built, because building all networks takes long.
    Networks of other files are not candidates.
    """
    layers = _possible_layers(arrays)
    known = [name for name in models.names() if name == beside or not models.is_of_file(name)]
    forms = {model: models.published(model) for model in ([first] if models.is_of_file(first) else known)}
    shares = {model: max(len(layers & names) / len(layers | names) for each in found for names in each.layer_names)
              for model, found in forms.items() if found}
    most = max(shares.values(), default=0.0)
    # A plug-in's layers are not known yet. Where no layer is known, one network stands for all: making all takes long.
    closest = [model for model in forms if shares.get(model, most) == most]
    if not most:
        closest = [model for model in closest if model not in shares] or closest[:1]
    for model in sorted(closest, key=lambda name: name != first):
        network = models.create(model)
        if not models.image_size(model) and network.has_one_size:
            network = replace(network, image_size=_size_of_images(network, arrays))
        shapes, aux_shapes = network.shapes()
        own = ((None, is_oihw) for is_oihw in sorted((False, True), reverse=models.is_channels_first(model)))
        for published, is_oihw in (*own, *((found, True) for found in forms[model])):
            yield _Candidate(network, published, is_oihw, shapes, aux_shapes)


def _possible_layers(arrays: Mapping[str, np.ndarray]) -> set[str]:
    """Names of layers to which a file's arrays may belong: conv0 and vgg0_conv0 for vgg0_conv0_weight."""
    found = set(arrays)  # an array may be a layer by itself, such as a layer scale
    for name in arrays:
        layer = re.sub(r"[._](?:running_|moving_)?[a-z]+$", "", name)
        words = layer.split("_")
        found.update("_".join(words[start:]) for start in range(len(words)))
    return found


def _size_of_images(network: Network, arrays: Mapping[str, np.ndarray]) -> int:
    """The height and width of images, in pixels, for which the first fully connected layer that reads all pixels has as
    many weights as in the file."""
    def weights(size: int) -> int:
        try:
            return replace(network, image_size=size).shapes()[0][name][-1]
        except GraphError:  # the size is too small for the layers before this layer
            return 0

    shapes, larger = (replace(network, image_size=network.image_size + more).shapes()[0] for more in (0, 64))
    name = next(name for name in shapes if shapes[name] != larger[name])
    if name not in arrays:
        return network.image_size
    return SIZES[min(bisect.bisect_left(SIZES, arrays[name].shape[-1], key=weights), len(SIZES) - 1)]


@dataclass(frozen=True)
class _Candidate:
    """A network together with a possible form of its arrays."""

    network: Network
    published: Published | None  # the library's names; None: our names
    is_oihw: bool  # layout of convolution weights; False: OHWI
    shapes: Shapes  # canonical shapes of the parameters, by our names
    aux_shapes: Shapes

    @property
    def model(self) -> str:
        """The network's name."""
        return self.network.name

    @property
    def model_names(self) -> set[str]:
        """The network's names, here and in the library."""
        return {self.model, self.published.model or self.model} if self.published else {self.model}

    @property
    def graph(self) -> Graph:
        """The network's graph, built only on demand, because this takes longer than all other work for a candidate."""
        return self.network.graph

    def name(self, ours: str) -> str:
        """The candidate's name for our array `ours`."""
        return self.published.name(ours) if self.published else ours

    @cached_property
    def wanted(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of each array in this form."""
        return {self.name(ours): self._form.shape(ours, shape) if self.is_oihw else shape
                for ours, shape in (*self.shapes.items(), *self.aux_shapes.items())}

    @property
    def _form(self) -> Published:
        """The rules for converting the arrays from and to the canonical form."""
        return self.published or Published("", {})

    @cached_property
    def classifier(self) -> list[str]:
        """Names of the classifier's weight and bias in this form."""
        return [self.name(ours) for ours in self.network.classifier]

    @cached_property
    def spare(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of each extra array that a file may have, except counters."""
        found = {name: self.aux_shapes[mean] for name, mean in self.biases.items()}
        if self.published and (images := self.published.norm_of_images):
            found |= {f"{images}.{end}": (3,) for end in ("gamma", "beta", *_STATISTICS)}
        return found

    @cached_property
    def biases(self) -> dict[str, str]:
        """Names, in this form, of possible biases of convolutions before a BatchNorm -> our name of that BatchNorm's
        running mean."""
        if not self.published:
            return {}
        weights = {conv.inputs[1].node: norm for norm, conv, _ in foldings(self.graph) if len(conv.inputs) == 2}
        return {self.name(weight).removesuffix("weight") + "bias": norm.inputs[3].node
                for weight, norm in weights.items()}

    def structural(self, arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Rename arrays. Gluon's numbered layer names become Gluon's structural names. A prefix that all names of the
        file have, such as vgg0_, is removed.
        """
        if not self.published:
            prefix = self._prefix(arrays)
            return {name.removeprefix(prefix): array for name, array in arrays.items()}
        if self.published.library != GLUON:
            return arrays
        counted = {name: _COUNTED.fullmatch(name) for name in arrays}
        layers = self.published.counted()
        return {f"{layers[found[1]]}.{found[2]}" if found and found[1] in layers else name: arrays[name]
                for name, found in counted.items()}

    def _prefix(self, arrays: Mapping[str, np.ndarray]) -> str:
        """The prefix that all names of the file have, and our names lack."""
        first, last = min(arrays), max(arrays)  # all names between these two begin with the common prefix of the two
        alike = next((place for place, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), 0)
        prefixes = ["", *(first[: place + 1] for place in range(alike) if first[place] == "_")]
        return max(prefixes, key=lambda prefix: sum(name.removeprefix(prefix) in self.wanted for name in arrays))

    def shared_names(self, arrays: Mapping[str, np.ndarray]) -> float:
        """The number of common names divided by the number of all names of file and candidate."""
        there, here = self.structural(arrays).keys(), self.wanted.keys()
        return len(there & here) / len(there | here)

    def fit(self, arrays: Mapping[str, np.ndarray]) -> float:
        """The share of all arrays, in file and candidate, that fit; 1 only if all arrays fit."""
        arrays = self.structural(arrays)
        there = {name for name in arrays if not (self._is_spare(name) and self._fits(name, arrays))}
        here = self.wanted.keys() - (set() if there & set(self.classifier) else set(self.classifier))
        return sum(self._fits(name, arrays) for name in there & here) / len(there | here)

    def _is_spare(self, name: str) -> bool:
        return _is_counter(name) or name in self.spare

    def _fits(self, name: str, arrays: Mapping[str, np.ndarray]) -> bool:
        if _is_counter(name):
            return True
        if name not in self.classifier:
            return arrays[name].shape == (self.wanted | self.spare)[name]
        return self._fits_but_rows(name, arrays) and len(self._rows(arrays)) == 1

    def _fits_but_rows(self, name: str, arrays: Mapping[str, np.ndarray]) -> bool:
        shape, wanted = arrays[name].shape, self.wanted[name]
        return shape[1:] == wanted[1:] and len(shape) == len(wanted)

    def _rows(self, arrays: Mapping[str, np.ndarray]) -> set[tuple[int, ...]]:
        """The numbers of rows of the classifier's weight and bias. Both have a row for each class."""
        return {arrays[name].shape[:1] for name in self.classifier if name in arrays}

    def difference(self, arrays: Mapping[str, np.ndarray]) -> str:
        """The first difference between the file's and the candidate's arrays, in words, and the number of further
        differences.
        """
        found = []
        for name in sorted(self.wanted.keys() | arrays.keys()):
            if name not in arrays:
                found += [f"which also has {name}"]
            elif name not in self.wanted and not self._is_spare(name):
                found += [f"which has no {name}"]
            elif not self._fits(name, arrays):
                found += [self._other_shape(name, arrays)]
        found = list(dict.fromkeys(found))  # weight and bias may give equal sentences
        return found[0] + (f" (and {len(found) - 1} more differences)" if len(found) > 1 else "")

    def _other_shape(self, name: str, arrays: Mapping[str, np.ndarray]) -> str:
        if name in self.classifier and self._fits_but_rows(name, arrays):
            shapes = " and ".join(str(arrays[each].shape) for each in self.classifier if each in arrays)
            return f"whose {' and '.join(self.classifier)} have a row for each class, and not the shapes {shapes}"
        return f"whose {name} is {(self.wanted | self.spare)[name]} and not {arrays[name].shape}"

    # --- the arrays in our form ---

    def take(self, path: Path, arrays: Mapping[str, np.ndarray], record: Record, wanted: str) -> Found:
        """Convert the arrays to our form. Raises TrainError if that is impossible."""
        library = self.published.library if self.published else ""
        for model, whose in ((wanted, "this run has --model"), (record.architecture, f"{record.file} says")):
            if model and model not in self.model_names:
                raise TrainError(f"{path} holds a {self.model}, but {whose} {model}: give weights of a {model}, or "
                                 f"correct the name to {self.model}")
        if not record.file:
            preparation = self.published.images if self.published else {}
            record = replace(record, **{"size": self.network.image_size, **preparation})
        for name, array in arrays.items():
            _check(path, name, array)
        params, aux = ({ours: self._canonical(arrays[self.name(ours)], shape)
                        for ours, shape in shapes.items() if self.name(ours) in arrays}
                       for shapes in (self.shapes, self.aux_shapes))
        notes = []
        if biases := [name for name in self.biases if name in arrays]:
            for name in biases:
                aux[self.biases[name]] = aux[self.biases[name]] - arrays[name].astype(np.float32)
            more = f" and {len(biases) - 1} more" if len(biases) > 1 else ""
            notes.append(f"{biases[0]}{more}: subtracted from the running means of the BatchNorms after them")
        if record.is_bgr:
            (first,) = roles.first_weights(self.graph)
            params[first] = np.ascontiguousarray(params[first][..., ::-1])
            notes.append(f"{self.name(first)}: reads blue, green, red; reversed to red, green, blue")
        images = self.published.norm_of_images if self.published else ""
        if statistics := {end: arrays[f"{images}.{end}"] for end in _STATISTICS if f"{images}.{end}" in arrays}:
            if len(statistics) < len(_STATISTICS):
                raise TrainError(f"{path} has only one of {images}'s {' and '.join(_STATISTICS)}: fetch or write it "
                                 "again")
            record = _with_norm(record, statistics)
            notes.append(f"{images}: normalises the images once more; merged into their mean and standard deviation")
        counters = [int(array.item()) for name, array in arrays.items() if _is_counter(name)]
        if counters:
            notes.append(f"{COUNTER} of {len(counters)} BatchNorms: ignored, as they have no effect")
        prepared_by = library if self.published and self.published.images else TORCHVISION
        return Found(self.model, library, prepared_by, params, aux, self.classifier[0], record, len(arrays),
                     max(counters, default=0), notes)

    def _canonical(self, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        return np.ascontiguousarray(self._form.ours(array, shape) if self.is_oihw else array, np.float32)


def _is_counter(name: str) -> bool:
    return name.rpartition(".")[2] == COUNTER


def _check(path: Path, name: str, array: np.ndarray) -> None:
    """Raise TrainError if a network cannot compute with the array."""
    if _is_counter(name):
        if array.size != 1 or not 0 <= array.item() < 2**63:
            raise TrainError(f"{path} cannot be used: its {name} is not a number of batches; fetch or write it again")
        return
    if array.dtype.kind != "f":
        raise TrainError(f"{path} cannot be used: its {name} is {array.dtype}, not floating-point; give weights "
                         "that are not quantised")
    with np.errstate(over="ignore"):
        if not np.isfinite(array.astype(np.float32)).all():
            raise TrainError(f"{path} cannot be used: its {name} has values that are not finite; give other weights")
    if name.endswith("_var") and array.min(initial=0) < 0:
        raise TrainError(f"{path} cannot be used: its {name} holds a negative variance; give other weights")


def _with_norm(record: Record, norm: Mapping[str, np.ndarray]) -> Record:
    """Merge Gluon's BatchNorm of the images, which has no gamma and beta, into the images' mean and standard deviation.
    """
    deviation = np.sqrt(norm["running_var"].astype(np.float64) + BATCH_NORM_EPS)
    mean, std = np.array(record.mean), np.array(record.std)
    return replace(record, mean=tuple((mean + std * norm["running_mean"]).tolist()),
                   std=tuple((std * deviation).tolist()))

"""A trained network that predicts the most likely classes of images, or computes their features.

    network = Predictor.load(InferenceOptions(checkpoint="runs/photos"))
    predictions = network.predict(["cat.jpg", pixels, encoded])
    features = network.embed(["cat.jpg", pixels, encoded])

The commands `predict` and `embed` and the library `resnet_mxnet` share this class. Pipelines and executors are kept
between calls, one for each number of images (rounded up to a power of two), so that a call costs little more than its
work.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from PIL import Image

from common import plugins
from common.phases import IMAGES, phase
from graph_passes.executors import Executor
from graph_passes.executors.base import parse_device
from pipelines import Batch, DataError, Loader
from pipelines.dali_loader import DaliLoader, unreadable
from pipelines.given import Given, given, has_thumbnails, open_in_order, source_of
from pipelines.sources import Source
from train import devices, models, weights
from train.build import inference_executor, loader_settings
from train.checkpoint import Checkpoint
from train.config import Config
from train.devices import Placement
from train.errors import TrainError
from train.features import Features
from train.image_paths import LIST, image_paths
from train.options.commands import InferenceOptions, PredictOptions
from train.pictures import predictions_html
from train.processes.distributed import Workers
from train.ranking import most_likely
from train.weights import int8_file
from train.weights.int8_file import Int8Network

GPU_BATCH = 256  # images per forward pass on a GPU, for many images
ONE_IMAGE = (str, os.PathLike, bytes, bytearray, memoryview, Image.Image)
# limited, because each loader has threads, and each executor has a copy of the parameters
KEPT_LOADERS, KEPT_EXECUTORS = 4, 3

log = logging.getLogger("train.prediction")
T = TypeVar("T", bound="Closable")


@dataclass(frozen=True)
class Guess:
    """A possible class of an image."""

    name: str
    index: int
    probability: float


@dataclass(frozen=True, eq=False)
class Prediction:
    """The most likely classes of an image, or the reason why there are none."""

    image: Any = field(repr=False)
    """The given image; for a folder, the path of each of its images."""
    guesses: list[Guess]
    """The most likely classes, the most likely first; empty for an image that cannot be read."""
    picture: np.ndarray | None = field(default=None, repr=False)
    """uint8 (size, size, 3): the image as the network sees it, if requested."""
    error: str = ""
    """Why the image cannot be read; "" for a good one."""
    damage: str = ""
    """The decoder's message about a damaged image that was predicted; "" for an intact one."""

    def _repr_html_(self) -> str:
        """The prediction as HTML, which a notebook shows."""
        return predictions_html([self])

    @property
    def file(self) -> Path:
        """The path of the image; raises TypeError if the image is not a file."""
        return Path(self.image)

    @property
    def best(self) -> Guess:
        """The most likely class. Raises TrainError for an image that cannot be read."""
        if self.error:
            raise TrainError(f"there is no prediction: {self.error}")
        return self.guesses[0]


class Prepared(NamedTuple):
    """A network that was read from its files, and the device that was chosen for it."""

    trained: Checkpoint
    config: Config
    placement: Placement
    int8: Int8Network | None  # if given, used in place of the float network


def prepared(options: InferenceOptions, workers: Workers) -> Prepared:
    """Read the weights and choose the device. Raises UserError."""
    trained = weights.load(options.checkpoint, quiet=workers.rank > 0)
    if int8 := int8_file.load(options.checkpoint, trained) if options.int8 else None:
        trained = int8.prepared(trained)
    config = replace(trained.config, device=options.device, executor=options.executor, dtype="auto",
                     batch_size=options.batch_size)
    if int8:
        config = devices.for_int8(config, vars(options))
    return Prepared(trained, config, devices.choose(config, workers.local_rank), int8)


def device_and_number(device: str) -> tuple[str, int | None]:
    """The value of --device and the GPU's number of a device such as "gpu(1)", "gpu", "cpu" or "auto". Raises
    UserError."""
    if not isinstance(device, str):
        raise TrainError(f"device is {device!r}: give 'auto', 'cpu', 'gpu', or one of several GPUs, such as 'gpu(1)'")
    if "(" not in device:
        return device, None
    kind, number = parse_device(device)
    return kind, number


def check_top(top: int, num_classes: int, place: str) -> int:
    """The number of classes listed for an image: five by default, or all if the network has fewer. Raises TrainError if
    `top` is larger than `num_classes`.
    """
    if top < 1:
        raise TrainError(f"--top {top} must be at least 1")
    if top > num_classes and top != PredictOptions.top:
        raise TrainError(f"--top {top} is more than the {num_classes} classes of {place}: give at most that many")
    return min(top, num_classes)


def finite(probabilities: np.ndarray, place: str) -> np.ndarray:
    """Return `probabilities`. Raises TrainError if some are not finite, because no largest value then exists."""
    if not np.isfinite(probabilities).all():
        raise TrainError(f"{place} gives probabilities that are not numbers: its weights are too large for the "
                         "precision that it computes in; give --device cpu, which computes in float32, or other "
                         "weights")
    return probabilities


class Closable(Protocol):
    def close(self) -> None: ...


class Kept(Generic[T]):
    """A cache of objects that are costly to make. Beyond `limit`, the least recently used object is closed."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: OrderedDict[Any, T] = OrderedDict()

    def get(self, key: Any, make: Callable[[], T]) -> T:
        if key not in self._items:
            made = make()
            while len(self._items) >= self._limit:
                self._items.popitem(last=False)[1].close()
            self._items[key] = made
        self._items.move_to_end(key)
        return self._items[key]

    def drop(self, key: Any) -> None:
        """Close and remove the item with this key, if the cache has one."""
        if key in self._items:
            self._items.pop(key).close()

    def close(self) -> None:
        while self._items:
            self._items.popitem()[1].close()


class Scores:
    """Computes class probabilities, with the interface of `Features`."""

    def __init__(self, prepared: Prepared, config: Config) -> None:
        self._executor: Executor = inference_executor(prepared.trained, prepared.int8, config, prepared.placement)

    def infer(self, data: Any) -> None:
        self._executor.infer(data)

    def request(self) -> Callable[[], np.ndarray]:
        return self._executor.request_probabilities()

    def close(self) -> None:
        self._executor.close()


class Answer(NamedTuple):
    """A network's results for the images of one batch."""

    places: list[int]  # indices of the N images in the caller's order
    values: np.ndarray  # (N, classes) or (N, features), float32
    batch: Batch  # the batch; its first N rows are the images


class Unread(NamedTuple):
    """Images by index, with the reason: unreadable ones, and damaged ones that were used."""

    bad: dict[int, str]
    damaged: dict[int, str]


class Predictor:
    """A trained network on a device. Several threads may use a predictor; they then take turns."""

    def __init__(self, prepared: Prepared, options: InferenceOptions, workers: Workers) -> None:
        """`options.batch_size`: the largest number of images in a forward pass."""
        self.prepared, self.options, self.workers = prepared, options, workers
        self.trained, self.place = prepared.trained, options.checkpoint
        # Both are stored, because finding them takes milliseconds: the network's graph must be built.
        self.num_classes, self.num_features = self.trained.num_classes, features_of(self.trained)
        named = {"model": self.trained.config.model, "loss": self.trained.config.loss}
        self._of_plugins = [plugins.find(kind, name) for kind, name in named.items()]
        self._loaders: Kept[DaliLoader] = Kept(KEPT_LOADERS)
        self._executors: Kept[Scores | Features] = Kept(KEPT_EXECUTORS)
        self._sizes: dict[type, int] = {}  # batch size of the cuda executor of each kind
        self._lock = threading.RLock()
        self._finalizer = weakref.finalize(self, _close, self._loaders, self._executors)
        self._finalizer.atexit = False  # the end of the process frees everything, and libraries may be unloaded by then

    @classmethod
    def load(cls, options: InferenceOptions, number: int | None = None, may_raise_batch: bool = False) -> Predictor:
        """Read a network. Raises UserError.

        Args:
            number: number of the GPU; None: this process's own.
            may_raise_batch: compute GPU_BATCH images in a forward pass on a GPU, instead of `options.batch_size`.
        """
        workers = Workers()
        if number is not None:
            workers.local_rank = number
        found = prepared(options, workers)
        if may_raise_batch and found.placement.device.startswith("gpu"):
            options = replace(options, batch_size=GPU_BATCH)
        return cls(found, options, workers)

    @property
    def image_size(self) -> int:
        """Height and width of the network's input, in pixels."""
        return self.prepared.config.inference_image_size

    @phase(IMAGES)
    def predict(self, images: Iterable[Any], top: int = PredictOptions.top, on_bad_image: str = "error",
                keep_pictures: bool = False) -> list[Prediction]:
        """The most likely classes of images, in their order.

        Args:
            images: each in a form that `pipelines.given.given` accepts.
            top: number of classes for each image.
            on_bad_image: "error" raises for an image that cannot be read; "skip" gives a Prediction with its `error`.
            keep_pictures: keep the image in each Prediction as the network sees it.

        Raises UserError.
        """
        images = list(images)
        top, names = check_top(top, self.num_classes, self.place), self.trained.class_names
        found, unread = [Prediction(image, []) for image in images], Unread({}, {})
        for answer in self.answers(_numbered(images), Scores, on_bad_image, unread):
            classes, best = most_likely(finite(answer.values, self.place), top)
            pictures = self._pictures(answer) if keep_pictures else [None] * len(classes)
            for place, indices, values, picture in zip(answer.places, classes.tolist(), best.tolist(), pictures,
                                                       strict=True):
                guesses = [Guess(names[i], i, value) for i, value in zip(indices, values, strict=True)]
                found[place] = Prediction(images[place], guesses, picture)
        for place, reason in unread.bad.items():
            found[place] = replace(found[place], error=reason)
        for place, message in unread.damaged.items():
            found[place] = replace(found[place], damage=message)
        return found

    @phase(IMAGES)
    def embed(self, images: Iterable[Any], on_bad_image: str = "error") -> np.ndarray:
        """The features of images (N, C), float32, in their order: the input of the classifier. With `on_bad_image`
        "skip" the row of an unreadable image is NaN. Raises UserError."""
        images = list(images)
        found = np.full((len(images), self.num_features), np.nan, np.float32)
        unread = Unread({}, {})
        for answer in self.answers(_numbered(images), Features, on_bad_image, unread):
            found[answer.places] = answer.values
        for place, message in unread.damaged.items():
            log.warning("image %d is damaged, and used as it decodes: %s", place, message)
        return found

    def answers(self, images: Sequence[Given], kind: type[Scores | Features], on_bad_image: str,
                unread: Unread) -> Iterator[Answer]:
        """Compute the results batch by batch: first all images of one form (paths, bytes, pixels), then all images of
        the next form, each in the given order. `unread` receives the images that are unreadable or damaged. Raises
        UserError.
        """
        if on_bad_image not in ("error", "skip"):
            raise TrainError(f"on_bad_image is {on_bad_image!r}: give 'error' or 'skip'")
        if kind is Features and self.prepared.int8:
            raise TrainError(f"the INT8 network of {self.place} has no features: load it without int8")
        by_form: dict[str, list[int]] = {}
        for place, image in enumerate(images):
            by_form.setdefault(image.feeds, []).append(place)
        with self._lock:
            if not self._finalizer.alive:
                raise TrainError(f"the network of {self.place} is closed: load it again")
            for places in by_form.values():
                yield from self._of_one_form(places, [images[place] for place in places], kind, on_bad_image, unread)

    def _of_one_form(self, places: Sequence[int], images: Sequence[Given], kind: type[Scores | Features],
                     on_bad_image: str, unread: Unread) -> Iterator[Answer]:
        source, size = source_of(images), batch_for(len(images), self.options.batch_size)
        with self._loader(source, size) as loader:
            try:
                for batch, receive in _requests(self._executor(kind, size), loader):
                    if loader.bad and on_bad_image == "error":
                        break
                    count = batch.num_valid
                    yield Answer([places[i] for i in batch.indices[:count]], receive()[:count], batch)
            except DataError:
                if len(loader.bad) < len(images):  # otherwise no image is readable, which `unread` then shows
                    raise
            if loader.bad and on_bad_image == "error":
                first, reason = min(loader.bad.items())
                raise unreadable(images[first].name, reason)
            unread.bad.update((places[i], reason) for i, reason in loader.bad.items())
            unread.damaged.update((places[i], message) for i, message in loader.damaged.items())

    @contextmanager
    def _loader(self, source: Source, size: int) -> Iterator[DaliLoader]:
        """The loader of these images in batches of `size`: for a single batch a cached loader, for several batches a
        loader that prefetches.
        """
        placement = self.prepared.placement

        def opened(**others: Any) -> DaliLoader:
            config = replace(self.prepared.config, batch_size=size)
            settings = loader_settings(self.options, config, placement, self.workers)
            return open_in_order(source, config.inference_image_size, **settings, **others)

        if len(source) > size:
            with closing(opened()) as loader:
                yield loader
            return
        key = source.feeds, size, placement.device.startswith("gpu") and has_thumbnails(source)
        loader = self._loaders.get(key, lambda: opened(prefetch=1))
        loader.exchange(source)
        try:
            yield loader
        except BaseException:
            self._loaders.drop(key)
            raise

    def _executor(self, kind: type[Scores | Features], size: int) -> Scores | Features:
        """The executor for batches of `size` images. The cuda executor also accepts smaller batches, so each kind has
        only one cuda executor.
        """
        is_cuda = self.prepared.placement.executor == "cuda"
        key: Any = kind if is_cuda else (kind, size)
        if is_cuda and self._sizes.get(kind, size) < size:
            self._executors.drop(key)

        def make() -> Scores | Features:
            self._sizes[kind] = size
            config = replace(self.prepared.config, batch_size=size)
            with plugins.known_again(self._of_plugins):
                if kind is Scores:
                    return Scores(self.prepared, config)
                return Features(self.trained, config, self.prepared.placement)

        return self._executors.get(key, make)

    def _pictures(self, answer: Answer) -> list[np.ndarray]:
        """The images as the network sees them, each uint8 (size, size, 3)."""
        config = self.prepared.config
        pixels = answer.batch.data.asnumpy()[: len(answer.places), ..., :3] * config.std + config.mean
        return list(pixels.round().clip(0, 255).astype(np.uint8))

    def close(self) -> None:
        """Free memory and threads now. The network must not be used afterwards."""
        with self._lock:
            self._finalizer()


def batch_for(count: int, most: int) -> int:
    """The batch size for this many images: the next power of two, but at most `most`. Only few sizes occur then, so the
    objects for a size are reused.
    """
    return min(most, 1 << (count - 1).bit_length())


def features_of(trained: Checkpoint) -> int:
    """The length C of a feature vector, which the network's classifier reads."""
    weight, *_ = models.create(trained.config.model, trained.num_classes).classifier
    # the weight is OHWI for a convolution, and (classes, C) for a fully connected layer
    return trained.params[weight].shape[-1]


def listed(images: Any) -> tuple[list[Any], bool]:
    """The single images in a program's argument, and whether the argument is one image.

    One image is a path of a file, the bytes of a file, an array (height, width, 3) or a Pillow image. Several images
    are a folder (all images in it, by name), a .txt file that lists image files, an array (N, height, width, 3), or an
    iterable of images, folders and lists. Raises UserError.
    """
    if isinstance(images, np.ndarray) and images.ndim == 4:
        return list(images), False
    if _is_of_several(images):
        return list(image_paths([Path(images)])), False
    if isinstance(images, (*ONE_IMAGE, np.ndarray)) or not isinstance(images, Iterable):
        return [images], True
    found: list[Any] = []
    for image in images:
        found += image_paths([Path(image)]) if _is_of_several(image) else [image]
    return found, False


def _is_of_several(image: Any) -> bool:
    """Whether `image` is the path of a folder or of a list of images."""
    if not isinstance(image, (str, os.PathLike)):
        return False
    path = Path(image)
    return path.is_dir() or path.suffix.lower() == LIST


def _numbered(images: Sequence[Any]) -> list[Given]:
    return [given(image, number) for number, image in enumerate(images)]


def _requests(executor: Scores | Features, loader: Loader) -> Iterator[tuple[Batch, Callable[[], np.ndarray]]]:
    """Yields each batch and a function that fetches its results. A batch is yielded only after the device has begun the
    next batch.
    """
    before: tuple[Batch, Callable[[], np.ndarray]] | None = None
    for batch in loader:
        executor.infer(batch.data)
        request = batch, executor.request()
        if before:
            yield before
        before = request
    if before:
        yield before


def _close(*kept: Kept[Any]) -> None:
    for each in kept:
        each.close()

"""The loader of real images: chooses the images of each batch, feeds the DALI graph, and hands its output to MXNet.

One process with batch size 32 sees the images of two processes with batch size 16, augmented identically. DALI drops a
whole batch if it cannot decode one image. The loader then searches the batches in flight for this image and makes the
batch again without the image. So clean data pays nothing for the check.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.mxnet_compat import mx
from pipelines import by_plugins
from pipelines.augment import WINDOW, Augmenter, source_code
from pipelines.balance import draw_balanced
from pipelines.by_pillow import PillowImages, reason_for_pillow, reason_for_pillow_of_file
from pipelines.decoder_messages import DecoderCheck, decoder_messages
from pipelines.errors import DataError
from pipelines.gpu import GpuDevice
from pipelines.graph import GraphConfig, ImageInputs, build_pipeline, longest_side, middle, random_inputs
from pipelines.inspect_image import BY_PILLOW, Finding, inspect_image, verdict
from pipelines.loader import Batch, Loader, LoaderConfig
from pipelines.progress import num_cores
from pipelines.recordio import BrokenRecordError
from pipelines.same_images import remarks_on_same_images
from pipelines.sources import Chosen, FileSource, Source, open_source
from pipelines.sources.base import labels_of, nfc

# batches fetched from the disk before they are planned: 0.1 s at 10,000 images/s, which is enough for many seeks
READ_AHEAD = 4

# Image headers are inspected LOOK_AHEAD batches before they are needed, LOOKED_AT_TOGETHER images per thread task,
# while the main loop waits for the GPU. Inspecting a batch's headers only when the batch was planned delayed the batch:
# 5,107 instead of 8,230 images/sec from class folders, 11,392 instead of 12,024 from RecordIO (one H200).
LOOK_AHEAD, LOOKED_AT_TOGETHER = 2, 32

# Images of fewer bytes are decoded on the CPU even for a GPU: for them, the fixed cost per image of the GPU's decoders
# is larger than the whole decoding on the CPU.
THUMBNAIL_BYTES = 8192

# Images of more bytes (about two megapixels) are resized before they wait for the training step: their windows take
# about 1 GB for a batch of 256, and several batches wait at a time.
LARGE_BYTES = 500_000

log = logging.getLogger("pipelines.dali_loader")


class Plan(NamedTuple):
    """A batch on its way through the pipeline."""

    indices: list[int]
    num_valid: int
    num_skipped: int  # number of bad images that other images replace
    size: int  # pixels, height and width of the network's input


class Look(NamedTuple):
    """An inspection of the image headers of a batch, running in threads."""

    new: np.ndarray  # images that are inspected for the first time
    found: list[Future[list[tuple[int, str]]]]  # images that Pillow must decode, with the reason


class DaliLoader(Loader):
    """Loads images from a source through the DALI graph, or through its first stages."""

    def __init__(self, config: LoaderConfig, shard: tuple[int, int], source: Source, stage: str = "full"):
        self._by_pillow = PillowImages()  # images that Pillow has decoded instead of DALI
        self._begin(config, shard, source)
        self._pool = ThreadPoolExecutor(config.num_threads or num_cores())  # starts its threads when there is work
        self._graph = GraphConfig(
            training=config.split == "train",
            transform=config.transform,
            image_size=config.image_size,
            dtype=config.dtype,
            channels=config.channels,
            device=config.device,
            feeds=source.feeds,
            cpu_decoder=decodes_on_cpu(config, source),
            hw_decoder_load=config.hw_decoder_load,
            stage=stage,
            max_pixels=config.max_pixels,
            large_images=config.device == "gpu" and source.mean_encoded_bytes > LARGE_BYTES,
        )
        if self._graph.training and stage == "full":
            by_plugins.check(config.transform.augment, config.size_in(0), config.device, config.device_id)
        self._longest_side = longest_side(self._graph)
        self._pipeline: Any = None
        self._augmenter: Augmenter | None = None
        self._prepared: tuple[Any, Any, Plan] | None = None
        self._order = functools.lru_cache(maxsize=2)(self._shuffle)  # caches the orders of this epoch and the next
        rank, size = shard
        # This process's part of a global batch. Neighbouring copies of an image go to different processes, as in
        # DeiT's RASampler: within one process, copies would leave BatchNorm and mixup with fewer different images.
        is_dealt = config.split == "train" and config.repeated_augmentation > 0
        self._share = slice(rank, None, size) if is_dealt else slice(rank * config.batch_size,
                                                                     (rank + 1) * config.batch_size)
        if config.split == "train":
            # computed now, so that a run whose disk fails later can still save its position
            self.stamps = self._stamps()
        self._images_by_class: list[np.ndarray] = []  # images of each class, for `balance`
        if config.balance and config.split == "train":
            self._images_by_class = list(self._sorted_by_class().values())
            sizes = [len(images) for images in self._images_by_class]
            self.remarks = [*source.remarks, f"--balance {config.balance:g}: the classes have {min(sizes):,} to "
                                             f"{max(sizes):,} images, and rare ones are drawn more often"]
        # MXNet keeps an array alive until MXNet's pending work on it is done. A consumer may also take the bare pointer
        # and launch work of its own. This work must finish before two more batches have been returned, because two
        # batches are held here.
        self._recent: deque[tuple[Any, Any]] = deque(maxlen=2)

    def _begin(self, config: LoaderConfig, shard: tuple[int, int], source: Source) -> None:
        """Begin with a source none of whose images has been inspected."""
        super().__init__(config, shard, len(source), source.classes)
        self._source, self.place = source, str(source.path)
        self.remarks = source.remarks
        self.damaged = dict(source.damaged)
        self._looked_at: set[int] = set()  # images that were checked for decoder messages
        self._is_known = np.zeros(len(source), np.bool_)  # images whose headers were inspected
        self._looks: dict[int, Look] = {}  # running inspections by batch number, counted through all epochs
        self._plans: deque[Plan] = deque()  # batches made ahead; the first of these is returned next
        self._planned = 0  # the next batch to plan, counted through all epochs
        self._read_ahead = 0  # the next batch to fetch from the disk, counted through all epochs
        self._num_looked_ahead = 0  # number of batches, see _images_ahead

    def exchange(self, source: Source) -> None:
        """Load the images of another source from now on, starting with its first batch, through the same pipeline:
        building a pipeline takes 0.1 s. For loaders of the split "val" without prefetching (`prefetch` 1), whose source
        has the same form (`feeds`). An iteration that has begun must not be continued."""
        if self._plans:  # a batch was made and not returned
            self._pipeline = None
        self._by_pillow.close()
        self._begin(self.config, self.shard, source)

    @property
    def cache_bytes(self) -> int:
        return self._source.cache_bytes

    def restore(self, state: bytes) -> None:
        super().restore(state)
        self._pipeline = self._prepared = None

    def _stamps(self) -> dict[str, list[str]]:
        if not self._source.stamp(0):
            return {}
        by_class: dict[int, list[int]] = {}
        for i in range(self.num_images):
            with contextlib.suppress(BrokenRecordError):
                by_class.setdefault(self._source.label(i), []).append(i)
        return {nfc(self.own_classes[label][0]): [_short_hash(self._source.stamp(i)) for i in
                                                  dict.fromkeys((images[0], images[len(images) // 2], images[-1]))]
                # a class with a single image is left out, because that image may have been repaired
                for label, images in by_class.items() if len(images) > 1}

    def prepare(self) -> None:
        self._prepared = self.run()

    def close(self) -> None:
        self._pipeline = self._prepared = None
        self._plans.clear()
        self._recent.clear()
        self._pool.shutdown()
        self._by_pillow.close()

    def _name(self, i: int) -> str:
        return self._source.name(i)

    def remarks_on_same_images(self, val: Loader | None) -> list[str]:
        return remarks_on_same_images(self._source, val._source if isinstance(val, DaliLoader) else None,
                                      self.config.data)

    def run(self) -> tuple[Any, Any, Plan]:
        """The next batch: images, labels and its Plan. DALI's output stays a list of tensors; images augmented by our
        kernels are an MXNet array."""
        if self._prepared:
            prepared, self._prepared = self._prepared, None
            return prepared
        images, labels, plan, *changes = self._run_pipeline()
        if changes:
            images = self._augmented(images, plan.size, *(each.as_tensor().data_ptr() for each in changes))
        return images, labels, plan

    def _augmented(self, images: Any, size: int, *changes: int) -> Any:
        """Run the kernels of augment.cu on images of any sizes; returns the batch as an MXNet array."""
        if self._augmenter is None:
            config = self.config
            device = GpuDevice(config.device_id, source_code(config.transform, config.dtype, config.channels))
            self._augmenter = Augmenter(config.transform, config.dtype, config.channels, device)
        try:
            return self._augmenter((size, size), windows(images), *changes)
        except mx.base.MXNetError as error:
            if "out of memory" in str(error):
                raise self._no_memory() from error
            raise

    def _no_memory(self) -> DataError:
        return DataError(f"{self.config.data}: the GPU has no memory left for the loader's batches of "
                         f"{self.config.batch_size} images; use a smaller batch size, or free memory on that GPU")

    def _run_pipeline(self) -> tuple[Any, ...]:
        """The graph's images and labels, the batch's Plan, and the graph's further outputs."""
        while True:
            try:
                if self._pipeline is None:
                    self._start()
                images, labels, *changes = self._pipeline.run()
                plan = self._plans.popleft()
                self._source.check(plan.indices)
                if decoder_messages().take() and self._find_damaged(plan):
                    continue
                return images, labels, plan, *changes
            except (RuntimeError, MemoryError) as error:  # DALI drops a whole batch because of one image
                self._pipeline = None
                decoder_messages().take()  # drop them: the batches in flight are decoded again
                if "CUDA allocation failed" in str(error):  # DALI's own message
                    raise self._no_memory() from error
                if isinstance(error, MemoryError):
                    raise
                if not self._exclude_undecodable():
                    raise DataError(f"{self.config.data}: DALI failed ({_last_line(error)})") from error

    def _load(self) -> Batch:
        images, labels, plan = self.run()
        # DALI's dynamic executor (its default) gives every batch its own memory, owned by the DLPack capsule. The array
        # is the pipeline's output without a copy; the memory returns to DALI's pool when MXNet drops its last
        # reference.
        data, label = (output if isinstance(output, mx.nd.NDArray)
                       else mx.nd.from_dlpack(output.as_tensor().__dlpack__()) for output in (images, labels))
        self._recent.append((data, label))
        self.num_skipped += plan.num_skipped
        return Batch(data, label, plan.num_valid, plan.indices[: plan.num_valid])

    def _start(self) -> None:
        """Build the pipeline so that it begins at the current position."""
        self._plans.clear()
        self._looks.clear()
        decoder_messages()  # the first call starts to catch decoder messages
        self._planned = self._read_ahead = self.epoch * self.num_batches + self.batch
        config = self.config
        self._pipeline = build_pipeline(
            self._graph,
            self._plan_next,
            config.batch_size,
            config.num_threads or num_cores(),
            config.device_id,
            config.prefetch,
        )

    def _plan_next(self) -> ImageInputs:
        """Choose the images of the next batch; DALI calls this `prefetch` batches ahead."""
        epoch, batch = divmod(self._planned, self.num_batches)
        self._planned += 1
        while self._read_ahead < self._planned + READ_AHEAD:
            self._source.read_ahead(self._wanted(*divmod(self._read_ahead, self.num_batches)))
            self._read_ahead += 1
        look_ahead = LOOK_AHEAD if self.config.prefetch > 1 else 0
        for number in range(self._planned - 1, self._planned + look_ahead):
            if number not in self._looks:
                self._looks[number] = self._look_at_headers(number)
        self._end_look(self._looks.pop(self._planned - 1))
        indices, images, num_valid, num_skipped = self._choose(epoch, batch)
        self._plans.append(Plan(indices, num_valid, num_skipped, self.config.size_in(epoch)))
        label = np.array([self.labels[self._source.label(i)] for i in indices], np.float32)
        return self._with_randoms(epoch, batch, ImageInputs(_joined(images), label))

    def _wanted(self, epoch: int, batch: int) -> list[int]:
        """The images of this process's share of a batch; in validation the share may be short or empty."""
        start = batch * self.global_batch
        end = min(start + self.global_batch, self.num_images)
        if self._graph.training:
            return self._order(epoch)[start:end][self._share].tolist()
        return list(range(start, end)[self._share])

    def _shuffle(self, epoch: int) -> np.ndarray:
        """The order of an epoch's images. Its length is always the number of images in the split.

        By default this is a permutation of all images; with `balance` images are drawn by class. With
        `repeated_augmentation` N, only the first 1/N of that order is used, each image N times in a row (Hoffer et al.,
        arXiv:1901.09335).
        """
        config = self.config
        rng = np.random.default_rng([config.seed, epoch])
        images = draw_balanced(self._images_by_class, config.balance, rng) if config.balance else self.num_images
        order = rng.permutation(images)
        if copies := config.repeated_augmentation:
            return np.repeat(order[: -(-len(order) // copies)], copies)[: len(order)]
        return order

    def labels_met(self) -> Iterator[int]:
        return labels_of(self._source)

    def class_sizes(self) -> np.ndarray:
        sizes = np.zeros(len(self.classes), np.int64)
        for label, images in self._sorted_by_class().items():
            sizes[self.labels[label]] += len(images)
        return sizes

    def _sorted_by_class(self) -> dict[int, np.ndarray]:
        """The images of each class that has images, sorted by the data's own class numbers."""
        by_class: dict[int, list[int]] = {}
        for i in range(self.num_images):
            try:
                by_class.setdefault(self._source.label(i), []).append(i)
            except BrokenRecordError as error:
                self._mark_bad(i, _reason(error))
        return {label: np.array(by_class[label]) for label in sorted(by_class)}

    def _choose(self, epoch: int, batch: int) -> tuple[list[int], list[np.ndarray], int, int]:
        """Choose this process's images of a batch: its share without bad images, padded with repetitions.

        Returns the image numbers, the graph's input for each, how many of them count, and how many were bad.
        """
        count, wanted = self.config.batch_size, self._wanted(epoch, batch)
        good = [(i, image) for i in wanted if (image := self._feed(i)) is not None]
        filling = good
        if not good:
            everywhere = ((i, self._feed_unseen(i)) for i in range(self.num_images))
            filling = [next(((i, image) for i, image in everywhere if image is not None), (-1, np.empty(0)))]
            if filling[0][0] < 0:
                first, reason = min(self.bad.items())
                raise DataError(f"{self.config.data}: none of the {self.num_images} images can be decoded, for example "
                                f"{self._source.name(first)}: {reason}; replace them")
        chosen = [*good, *itertools.islice(itertools.cycle(filling), count - len(good))]
        indices, images = zip(*chosen, strict=True)
        return list(indices), list(images), count if self._graph.training else len(good), len(wanted) - len(good)

    def _feed(self, i: int) -> np.ndarray | None:
        """The graph's input for an image; None if the image is bad."""
        if i in self.bad:
            return None
        try:
            image = self._source.feed(i)
        except (OSError, BrokenRecordError) as error:
            self._mark_bad(i, _reason(error))
            return None
        if self._graph.feeds == "pixels":
            return middle(image, self._longest_side) if self._longest_side else image
        return self._by_pillow.feed(i, self._graph.feeds) if i in self._by_pillow else image

    def _feed_unseen(self, i: int) -> np.ndarray | None:
        """`_feed` for an image of any batch, whose header may not have been inspected yet."""
        if self._graph.feeds != "pixels" and not self._is_known[i]:
            self._end_inspection([i], self._by_header([i]))
        return self._feed(i)

    def _look_at_headers(self, number: int) -> Look:
        """Start to search batch `number`, counted through all epochs, for images that DALI decodes wrongly."""
        wanted = np.unique(np.array(self._wanted(*divmod(number, self.num_batches)), np.int64))
        new = wanted[~self._is_known[wanted]] if self._graph.feeds != "pixels" else wanted[:0]
        parts = [new[start : start + LOOKED_AT_TOGETHER].tolist() for start in range(0, len(new), LOOKED_AT_TOGETHER)]
        return Look(new, [self._pool.submit(self._by_header, part) for part in parts])

    def _end_look(self, look: Look) -> None:
        self._end_inspection(look.new, [each for part in look.found for each in part.result()])

    def _end_inspection(self, indices: Sequence[int] | np.ndarray, found: Sequence[tuple[int, str]]) -> None:
        """Have Pillow decode `found`: (index, reason) of the images among `indices` that DALI cannot decode."""
        self._decode_by_pillow([(i, reason) for i, reason in found if i not in self._by_pillow and i not in self.bad])
        self._is_known[indices] = True

    def _by_header(self, indices: Sequence[int]) -> list[tuple[int, str]]:
        """The images among `indices` that Pillow must decode, with the reason."""
        return [(i, reason) for i in indices if (reason := self._header(i))]

    def _header(self, i: int) -> str:
        """The reason, found in its header, why Pillow must decode an image; "" if none or if it cannot be read."""
        try:
            fed = self._source.feed(i)
            if self._graph.feeds == "paths":
                return reason_for_pillow_of_file(fed.tobytes())
            return reason_for_pillow(lambda at, size: fed[at : at + size].tobytes())
        except (OSError, BrokenRecordError):
            return ""

    def _decode_by_pillow(self, which: Sequence[tuple[int, str]]) -> None:
        """Have Pillow decode images that DALI refuses or decodes wrongly; `which` holds (image, reason)."""
        if which and not len(self._by_pillow):
            log.warning("%s: %s; Pillow decodes it and all other images that DALI does not decode correctly, once each",
                        self._source.name(which[0][0]), which[0][1])
        for (i, _), fault in zip(which, self._pool.map(self._add_by_pillow, [i for i, _ in which]), strict=True):
            if fault:
                self._mark_bad(i, fault)

    def _add_by_pillow(self, i: int) -> str:
        """Decode an image with Pillow; returns the reason if that fails, else ""."""
        if fault := self._fault(i):
            return fault
        try:
            self._by_pillow.add(i, self._source.read(i).tobytes())
        except Exception as error:  # no list contains all exceptions that Pillow raises
            return f"neither DALI nor Pillow can decode it ({' '.join(str(error).split())})"
        return ""

    def _with_randoms(self, epoch: int, batch: int, inputs: ImageInputs) -> ImageInputs:
        if not self._graph.training:
            return inputs
        count = self.config.batch_size
        # Drawn for the whole global batch, then sliced: an image's augmentation must not depend on the process.
        rng = np.random.default_rng([self.config.seed, epoch, batch])
        randoms = random_inputs(rng, self.global_batch, self.config.transform)
        mine = {name: np.ascontiguousarray(values[self._share]) for name, values in randoms.items()}
        return inputs._replace(size=np.full((count, 2), self.config.size_in(epoch), np.float32), **mine)

    def _exclude_undecodable(self) -> bool:
        """Search the batches in flight for images that cannot be decoded; returns False if there are none.

        Inspecting images costs about as much as loading them, but each failure costs a new pipeline. So every further
        failure doubles the number of batches that are inspected ahead: a data set with many broken images pays the cost
        of a `verify`, a data set with one broken image pays almost nothing.
        """
        before = len(self.bad) + len(self._by_pillow)
        under_way = {i for plan in self._plans for i in plan.indices}
        self._source.check(under_way)
        looked_at = sorted(i for i in (under_way | self._images_ahead()) - self.bad.keys() if i not in self._by_pillow)
        findings = dict(zip(looked_at, self._pool.map(self._finding, looked_at), strict=True))
        doubtful = [i for i, finding in findings.items() if finding and finding.doubtful]
        said = self._decoder_check()(doubtful, alone=doubtful)
        for i, finding in findings.items():
            if finding and not finding.usable:
                self._settle(i, finding, said.get(i, ""))
        if self.bad.keys().isdisjoint(under_way):
            for i in list(_undecodable(self._graph, self._feed, under_way)):
                if i in self._by_pillow:
                    self._mark_bad(i, "DALI cannot decode it, nor the PNG that Pillow made of it")
                else:
                    self._decode_by_pillow([(i, "DALI cannot decode it")])
        if self.config.on_bad_image == "skip":
            self._look_further_ahead()
        return len(self.bad) + len(self._by_pillow) > before

    def _find_damaged(self, plan: Plan) -> bool:
        """Find the images in this batch, and in the batches in flight, that caused the decoder's messages.

        Returns True if a search was made. A search drops the pipeline, so this batch must then be made again. Each
        image is checked once. Each search that finds images doubles the number of batches that the next search checks
        ahead, as in `_exclude_undecodable`.
        """
        under_way = set(plan.indices).union(*(later.indices for later in self._plans))
        if under_way <= self._looked_at:
            return False  # the message is about an image that was checked before
        self._pipeline = None  # otherwise the pipeline would continue to decode and to write messages
        places = sorted((under_way | self._images_ahead()) - self._looked_at - self.bad.keys())
        self._looked_at.update(places)
        found = self._decoder_check()(places)
        if found:
            self._look_further_ahead()
        for i, message in found.items():
            self._settle(i, self._finding(i), message)
        return True

    def _decoder_check(self) -> DecoderCheck:
        return DecoderCheck(self._source.read, self.config.num_threads, self.config.max_pixels)

    def _settle(self, i: int, finding: Finding | None, decoder: str) -> None:
        """Treat an image as `verify` judges it: mark it bad, have Pillow decode it, or note its damage."""
        judged = verdict(finding, decoder)
        if judged and not judged.usable:
            self._mark_bad(i, f"{judged.kind}, {judged.detail}")
        elif judged and judged.kind == BY_PILLOW:
            self._decode_by_pillow([(i, judged.detail)])
        elif judged and judged.kind == "damaged":
            self.damaged[i] = judged.detail

    def _images_ahead(self) -> set[int]:
        """The images of the next `_num_looked_ahead` batches after those in flight."""
        ahead = range(self._planned, self._planned + self._num_looked_ahead)
        return {i for number in ahead for i in self._wanted(*divmod(number, self.num_batches))}

    def _look_further_ahead(self) -> None:
        self._num_looked_ahead = min(max(1, 2 * self._num_looked_ahead), self.num_batches)

    def _fault(self, i: int) -> str:
        """The reason why Pillow cannot decode an image, or ""."""
        finding = self._finding(i)
        return f"{finding.kind}, {finding.detail}" if finding and not finding.usable else ""

    def _finding(self, i: int) -> Finding | None:
        """Pillow's finding about an image, or the reason why it cannot be read."""
        try:
            return inspect_image(self._source.read(i).tobytes(), self.config.max_pixels)
        except (OSError, BrokenRecordError) as error:
            return Finding("unreadable", _reason(error), False)

    def _mark_bad(self, i: int, reason: str) -> None:
        self._source.check([i])
        if self.config.on_bad_image == "error":
            raise unreadable(self._source.name(i), reason)
        self.bad[i] = reason


def windows(images: Any) -> np.ndarray:
    """The addresses and sizes of the images in a DALI tensor list: (N,) of WINDOW."""
    found = np.empty(len(images), WINDOW)
    found["address"] = [images[i].data_ptr() for i in range(len(images))]
    found["height"], found["width"], _ = zip(*images.shape(), strict=True)
    if not (found["height"] * found["width"]).all():
        raise DataError("a random crop of a very small image has no pixels; raise the first number of --random-area")
    return found


def unreadable(name: str, reason: str) -> DataError:
    """The error for an image that cannot be decoded."""
    return DataError(f"{name}: {reason}; replace it, list all such images with `python -m pipelines verify`, or go on "
                     "without them with --on-bad-image skip")


def _short_hash(text: str) -> str:
    return hashlib.blake2b(os.fsencode(text), digest_size=4).hexdigest()


def _reason(error: OSError | BrokenRecordError) -> str:
    """The reason why an image cannot be read, in words."""
    return f"cannot be read ({error.strerror or error})" if isinstance(error, OSError) else str(error)


def _joined(images: list[np.ndarray]) -> list[np.ndarray] | np.ndarray:
    """Images of equal size stacked into one array, which takes a hundredth of the time to hand to DALI."""
    return np.stack(images) if len({image.shape for image in images}) == 1 else images


def decodes_on_cpu(config: LoaderConfig, source: Source) -> bool:
    """Whether a pipeline on the GPU decodes on the CPU."""
    if config.device == "cpu" or config.decoder != "auto":
        return config.device == "gpu" and config.decoder == "cpu"
    return 0 < source.mean_encoded_bytes < THUMBNAIL_BYTES


def _undecodable(graph: GraphConfig, fed: Callable[[int], np.ndarray | None], indices: Iterable[int]) -> Iterator[int]:
    """Try each image alone and yield those that DALI cannot decode; `fed(i)` is the graph's input for image i."""
    one: list[int] = [0]

    def feed() -> ImageInputs:
        return ImageInputs([fed(one[0])], np.zeros(1, np.float32))

    pipeline: Any = None
    for one[0] in sorted(indices):
        # training=False decodes the whole image: the next epoch will want another window of it.
        pipeline = pipeline or build_pipeline(replace(graph, training=False), feed, 1, 1, prefetch=1)
        try:
            pipeline.run()
        except RuntimeError:
            pipeline = None
            yield one[0]


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line and "no longer valid" not in line]
    return lines[-1] if lines else type(error).__name__


def open_files(files: Sequence[str | Path], image_size: int, batch_size: int, **options: Any) -> DaliLoader:
    """The loader for prediction on image files: in order, through the validation transform.

    `files` holds at least one file. `options` are further fields of LoaderConfig (device, dtype, channels,
    on_bad_image, ...). A batch's `label` holds the positions of its images in `files`; only the first `num_valid` rows
    count. A missing file counts as a bad image.
    """
    config = LoaderConfig(data="files", split="val", image_size=image_size, batch_size=batch_size, **options)
    return DaliLoader(config, (0, 1), files_in_order(files))


def files_in_order(files: Sequence[str | Path]) -> Source:
    """The source of image files (at least one). An image's label is its position."""
    return FileSource(Path(files[0]).parent, files, range(len(files)), [("", "")] * len(files))


def open_chosen(config: LoaderConfig, indices: Sequence[int]) -> DaliLoader:
    """The loader of the chosen images of `config`'s split, in the given order, through the validation transform (for
    either split). Raises DataError."""
    source = Chosen(open_source(config.data, config.split, **config.reading), indices)
    return DaliLoader(replace(config, split="val", prefetch=1), (0, 1), source)

"""The loader of real images: decides which images a batch holds, hands them to the DALI graph, and its output to MXNet.

One process with batch 32 sees the images of two with batch 16, augmented alike. DALI gives up a whole batch when it
cannot decode one image; then the culprit is looked for among the images under way, and the batch is made again without
it. So clean data pays nothing for the check.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.mxnet_compat import mx
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
from pipelines.sources import Chosen, FileSource, Source, open_source
from pipelines.sources.base import labels_of

READ_AHEAD = 4  # batches that are fetched from the disk before they are planned: 0.1 s at 10,000 images/s, many seeks

# Batches whose headers are looked at before they are planned, this many images in one task of a thread: meanwhile the
# loop waits for the GPU. Looked at when it is planned, a batch waited: 5,107 images/sec from class folders for 8,230,
# 11,392 from RecordIO for 12,024 (one H200).
LOOK_AHEAD, LOOKED_AT_TOGETHER = 2, 32

# Images of fewer bytes are decoded on the CPU for a GPU too: what the GPU's decoders take for an image, however small
# it is, exceeds the decoding.
THUMBNAIL_BYTES = 8192

# Images of more bytes, about two megapixels, are resized before they wait for the step: the windows of a batch of 256
# take about 1 GB then, and those of some batches wait.
LARGE_BYTES = 500_000

log = logging.getLogger("pipelines.dali_loader")


class Plan(NamedTuple):
    """A batch on its way through the pipeline."""

    indices: list[int]
    num_valid: int
    num_skipped: int  # bad ones, in whose place others are
    size: int  # pixels, height and width of the network's input


class Look(NamedTuple):
    """A look at the headers of a batch's images, under way in threads."""

    new: np.ndarray  # images that are met for the first time
    found: list[Future[list[tuple[int, str]]]]  # those that Pillow is to decode, and why


class DaliLoader(Loader):
    """Images from a source, through the DALI graph (or its first stages)."""

    def __init__(self, config: LoaderConfig, shard: tuple[int, int], source: Source, stage: str = "full"):
        super().__init__(config, shard, len(source), source.classes)
        self._source = source
        self.remarks = source.remarks
        self.damaged = dict(source.damaged)
        self._looked_at: set[int] = set()  # images that the decoder was asked about, each alone
        self._by_pillow = PillowImages()  # images that Pillow has decoded in DALI's place
        self._is_known = np.zeros(len(source), np.bool_)  # images whose headers were looked at for that
        self._looks: dict[int, Look] = {}  # under way, by the batch that they are for
        self._pool = ThreadPoolExecutor(config.num_threads or num_cores())  # its threads begin when there is work
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
        self._longest_side = longest_side(self._graph)
        self._pipeline: Any = None
        self._augmenter: Augmenter | None = None
        self._plans: deque[Plan] = deque()  # made ahead, the next to be returned first
        self._prepared: tuple[Any, Any, Plan] | None = None
        self._planned = 0  # the plan to be made next, batches counted through all epochs
        self._read_ahead = 0  # the batch to be asked for next, counted likewise
        self._num_looked_ahead = 0  # batches, see _images_ahead
        self._order = functools.lru_cache(maxsize=2)(self._shuffle)  # of this epoch and the next
        rank, size = shard
        # This process's part of a global batch. Copies of an image, which follow each other, are dealt out to the
        # processes (as DeiT's RASampler does), for whose BatchNorm and mixup they are so many images the fewer.
        is_dealt = config.split == "train" and config.repeated_augmentation > 0
        self._share = slice(rank, None, size) if is_dealt else slice(rank * config.batch_size,
                                                                     (rank + 1) * config.batch_size)
        self._images_by_class: list[np.ndarray] = []  # with `balance`
        if config.balance and config.split == "train":
            self._images_by_class = list(self._sorted_by_class().values())
            sizes = [len(images) for images in self._images_by_class]
            self.remarks = [*source.remarks, f"--balance {config.balance:g}: the classes have {min(sizes):,} to "
                                             f"{max(sizes):,} images, and are drawn more equally often"]
        # MXNet keeps an array alive until all work that it was handed to is done. A consumer that takes the bare
        # pointer and launches work of its own has until two batches later.
        self._recent: deque[tuple[Any, Any]] = deque(maxlen=2)

    @property
    def cache_bytes(self) -> int:
        return self._source.cache_bytes

    def restore(self, state: bytes) -> None:
        super().restore(state)
        self._pipeline = self._prepared = None

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

    def run(self) -> tuple[Any, Any, Plan]:
        """Images and labels of the next batch as DALI's own lists of tensors, images that our kernels have augmented as
        an MXNet array; and which images these are."""
        if self._prepared:
            prepared, self._prepared = self._prepared, None
            return prepared
        images, labels, plan, *changes = self._run_pipeline()
        if changes:
            images = self._augmented(images, plan.size, *(each.as_tensor().data_ptr() for each in changes))
        return images, labels, plan

    def _augmented(self, images: Any, size: int, *changes: int) -> Any:
        """The batch that the kernels of augment.cu make of images of any sizes, as an MXNet array."""
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
        """The graph's images and labels, which images these are, and what else the graph gives."""
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
            except (RuntimeError, MemoryError) as error:  # DALI gives up a whole batch for one image
                self._pipeline = None
                decoder_messages().take()  # what was on its way is decoded anew
                if "CUDA allocation failed" in str(error):  # DALI's words
                    raise self._no_memory() from error
                if isinstance(error, MemoryError):
                    raise
                if not self._exclude_undecodable():
                    raise DataError(f"{self.config.data}: DALI failed ({_last_line(error)})") from error

    def _load(self) -> Batch:
        images, labels, plan = self.run()
        # DALI's dynamic executor (its default) gives every batch memory of its own, which the DLPack capsule owns: the
        # array is the pipeline's output itself, and goes back to DALI's pool when MXNet drops its last reference.
        data, label = (output if isinstance(output, mx.nd.NDArray)
                       else mx.nd.from_dlpack(output.as_tensor().__dlpack__()) for output in (images, labels))
        self._recent.append((data, label))
        self.num_skipped += plan.num_skipped
        return Batch(data, label, plan.num_valid, plan.indices[: plan.num_valid])

    def _start(self) -> None:
        """Build the pipeline, to begin at the current position."""
        self._plans.clear()
        self._looks.clear()
        decoder_messages()  # from now on they are caught
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
        """Decide on the next batch to be made; called by DALI, `prefetch` batches ahead."""
        epoch, batch = divmod(self._planned, self.num_batches)
        self._planned += 1
        while self._read_ahead < self._planned + READ_AHEAD:
            self._source.read_ahead(self._wanted(*divmod(self._read_ahead, self.num_batches)))
            self._read_ahead += 1
        for number in range(self._planned - 1, self._planned + LOOK_AHEAD):
            if number not in self._looks:
                self._looks[number] = self._look_at_headers(number)
        self._end_look(self._looks.pop(self._planned - 1))
        indices, images, num_valid, num_skipped = self._choose(epoch, batch)
        self._plans.append(Plan(indices, num_valid, num_skipped, self.config.size_in(epoch)))
        label = np.array([self.labels[self._source.label(i)] for i in indices], np.float32)
        return self._with_randoms(epoch, batch, ImageInputs(_joined(images), label))

    def _wanted(self, epoch: int, batch: int) -> list[int]:
        """This process's share of a batch; in validation it may be short or empty."""
        start = batch * self.global_batch
        end = min(start + self.global_batch, self.num_images)
        if self._graph.training:
            return self._order(epoch)[start:end][self._share].tolist()
        return list(range(start, end)[self._share])

    def _shuffle(self, epoch: int) -> np.ndarray:
        """An epoch's images, in its order: all of them, or with `balance` as many, drawn by class. With
        `repeated_augmentation` N as many, but those of the first N-th only, each N times in a row (Hoffer et al.,
        arXiv:1901.09335)."""
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
        """The images of each class that has some, by the data's class numbers, in their order."""
        by_class: dict[int, list[int]] = {}
        for i in range(self.num_images):
            try:
                by_class.setdefault(self._source.label(i), []).append(i)
            except BrokenRecordError as error:
                self._mark_bad(i, _reason(error))
        return {label: np.array(by_class[label]) for label in sorted(by_class)}

    def _choose(self, epoch: int, batch: int) -> tuple[list[int], list[np.ndarray], int, int]:
        """Images of a batch, and what the graph is fed with for them: those of this process's share that are not bad,
        filled up with repetitions. How many of them count, and how many were bad."""
        count, wanted = self.config.batch_size, self._wanted(epoch, batch)
        good = [(i, image) for i in wanted if (image := self._feed(i)) is not None]
        filling = good
        if not good:
            everywhere = ((i, self._feed_unseen(i)) for i in range(self.num_images))
            filling = [next(((i, image) for i, image in everywhere if image is not None), (-1, np.empty(0)))]
            if filling[0][0] < 0:
                first, reason = min(self.bad.items())
                raise DataError(f"{self.config.data}: none of the {self.num_images} images can be decoded, from "
                                f"{self._source.name(first)} on: {reason}; replace them")
        chosen = [*good, *itertools.islice(itertools.cycle(filling), count - len(good))]
        indices, images = zip(*chosen, strict=True)
        return list(indices), list(images), count if self._graph.training else len(good), len(wanted) - len(good)

    def _feed(self, i: int) -> np.ndarray | None:
        """What the graph gets for an image; None for one that is bad."""
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
        """The same for an image of any batch."""
        if self._graph.feeds != "pixels" and not self._is_known[i]:
            self._end_look(Look(np.array([i]), [self._pool.submit(self._by_header, [i])]))
        return self._feed(i)

    def _look_at_headers(self, number: int) -> Look:
        """Begin to look for images that DALI decodes otherwise than Pillow, in a batch, counted through all epochs."""
        wanted = np.unique(np.array(self._wanted(*divmod(number, self.num_batches)), np.int64))
        new = wanted[~self._is_known[wanted]] if self._graph.feeds != "pixels" else wanted[:0]
        parts = [new[start : start + LOOKED_AT_TOGETHER].tolist() for start in range(0, len(new), LOOKED_AT_TOGETHER)]
        return Look(new, [self._pool.submit(self._by_header, part) for part in parts])

    def _end_look(self, look: Look) -> None:
        found = [each for part in look.found for each in part.result()]
        self._decode_by_pillow([(i, reason) for i, reason in found if i not in self._by_pillow and i not in self.bad])
        self._is_known[look.new] = True

    def _by_header(self, indices: Sequence[int]) -> list[tuple[int, str]]:
        """Images that Pillow is to decode, and why."""
        return [(i, reason) for i in indices if (reason := self._header(i))]

    def _header(self, i: int) -> str:
        """Why Pillow is to decode an image, by its header; "" also for one that cannot be read."""
        try:
            fed = self._source.feed(i)
            if self._graph.feeds == "paths":
                return reason_for_pillow_of_file(fed.tobytes())
            return reason_for_pillow(lambda at, size: fed[at : at + size].tobytes())
        except (OSError, BrokenRecordError):
            return ""

    def _decode_by_pillow(self, which: Sequence[tuple[int, str]]) -> None:
        """Have Pillow decode images that DALI does not decode, or not rightly, for the reasons given."""
        if which and not len(self._by_pillow):
            log.warning("%s: %s; it and others that DALI does not decode rightly are decoded by Pillow, each once",
                        self._source.name(which[0][0]), which[0][1])
        for (i, _), fault in zip(which, self._pool.map(self._add_by_pillow, [i for i, _ in which]), strict=True):
            if fault:
                self._mark_bad(i, fault)

    def _add_by_pillow(self, i: int) -> str:
        """Decode an image; returns why it cannot be, or ""."""
        if fault := self._fault(i):
            return fault
        try:
            self._by_pillow.add(i, self._source.read(i).tobytes())
        except Exception as error:  # no list has all that Pillow raises
            return f"neither DALI nor Pillow can decode it ({' '.join(str(error).split())})"
        return ""

    def _with_randoms(self, epoch: int, batch: int, inputs: ImageInputs) -> ImageInputs:
        if not self._graph.training:
            return inputs
        count = self.config.batch_size
        # Drawn for the whole global batch and cut, so that an image's augmentation does not depend on who loads it.
        rng = np.random.default_rng([self.config.seed, epoch, batch])
        randoms = random_inputs(rng, self.global_batch, self.config.transform)
        mine = {name: np.ascontiguousarray(values[self._share]) for name, values in randoms.items()}
        return inputs._replace(size=np.full((count, 2), self.config.size_in(epoch), np.float32), **mine)

    def _exclude_undecodable(self) -> bool:
        """Find the images that cannot be decoded among those on their way; False if there are none.

        To look costs about as much as to load. But each failure costs a new pipeline, so every further one looks ahead
        at twice as many batches: a data set with many broken images pays for a `verify`, one with a single one hardly.
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
                    self._mark_bad(i, "DALI cannot decode it, nor what Pillow made of it")
                else:
                    self._decode_by_pillow([(i, "DALI cannot decode it")])
        if self.config.on_bad_image == "skip":
            self._look_further_ahead()
        return len(self.bad) + len(self._by_pillow) > before

    def _find_damaged(self, plan: Plan) -> bool:
        """Find the images of which the decoder has written a message, among those of this batch and those on their way.
        True if they were looked for, which takes the pipeline: the batch is then to be made again.

        Each image is looked at once, and further ahead with each find, as for those that cannot be decoded.
        """
        under_way = set(plan.indices).union(*(later.indices for later in self._plans))
        if under_way <= self._looked_at:
            return False  # of one that is known
        self._pipeline = None  # else it would go on decoding, and writing messages
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
        """Go on with an image as `verify` judges it, by what Pillow finds and the decoder says."""
        judged = verdict(finding, decoder)
        if judged and not judged.usable:
            self._mark_bad(i, f"{judged.kind}, {judged.detail}")
        elif judged and judged.kind == BY_PILLOW:
            self._decode_by_pillow([(i, judged.detail)])
        elif judged and judged.kind == "damaged":
            self.damaged[i] = judged.detail

    def _images_ahead(self) -> set[int]:
        """The images of some batches after the ones under way."""
        ahead = range(self._planned, self._planned + self._num_looked_ahead)
        return {i for number in ahead for i in self._wanted(*divmod(number, self.num_batches))}

    def _look_further_ahead(self) -> None:
        self._num_looked_ahead = min(max(1, 2 * self._num_looked_ahead), self.num_batches)

    def _fault(self, i: int) -> str:
        """Why Pillow cannot decode an image, or ""."""
        finding = self._finding(i)
        return f"{finding.kind}, {finding.detail}" if finding and not finding.usable else ""

    def _finding(self, i: int) -> Finding | None:
        """What Pillow says of an image."""
        try:
            return inspect_image(self._source.read(i).tobytes(), self.config.max_pixels)
        except (OSError, BrokenRecordError) as error:
            return Finding("unreadable", _reason(error), False)

    def _mark_bad(self, i: int, reason: str) -> None:
        self._source.check([i])
        if self.config.on_bad_image == "error":
            raise DataError(
                f"{self._source.name(i)}: {reason}; replace it, list all such images with "
                f"`python -m pipelines verify`, or go on without them with --on-bad-image skip"
            )
        self.bad[i] = reason


def windows(images: Any) -> np.ndarray:
    """Where the images of a list of DALI's lie, and their sizes: (N,) of WINDOW."""
    found = np.empty(len(images), WINDOW)
    found["address"] = [images[i].data_ptr() for i in range(len(images))]
    found["height"], found["width"], _ = zip(*images.shape(), strict=True)
    if not (found["height"] * found["width"]).all():
        raise DataError("a random crop of a very small image has no pixels; raise the first of --random-area")
    return found


def _reason(error: OSError | BrokenRecordError) -> str:
    """Why an image cannot be read, in words."""
    return f"cannot be read ({error.strerror or error})" if isinstance(error, OSError) else str(error)


def _joined(images: list[np.ndarray]) -> list[np.ndarray] | np.ndarray:
    """Images of equal size as one array, which is handed to DALI in a hundredth of the time."""
    return np.stack(images) if len({image.shape for image in images}) == 1 else images


def decodes_on_cpu(config: LoaderConfig, source: Source) -> bool:
    """Whether a pipeline on the GPU is to decode on the CPU."""
    if config.device == "cpu" or config.decoder != "auto":
        return config.device == "gpu" and config.decoder == "cpu"
    return 0 < source.mean_encoded_bytes < THUMBNAIL_BYTES


def _undecodable(graph: GraphConfig, fed: Callable[[int], np.ndarray | None], indices: Iterable[int]) -> Iterator[int]:
    """The images among `indices` that DALI cannot decode, each tried alone; `fed(i)` is what the graph gets."""
    one: list[int] = [0]

    def feed() -> ImageInputs:
        return ImageInputs([fed(one[0])], np.zeros(1, np.float32))

    pipeline: Any = None
    for one[0] in sorted(indices):
        # All of the image, whichever window was wanted: it will be wanted elsewhere in the next epoch.
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
    """The loader of these image files, one at least, for prediction: in order, through the validation transform.

    `options` are further fields of LoaderConfig (device, dtype, channels, on_bad_image, ...). A batch's `label` holds
    the positions of its images in `files`; only the first `num_valid` rows count. A file that is missing is a bad
    image, as others are.
    """
    config = LoaderConfig(data="files", split="val", image_size=image_size, batch_size=batch_size, **options)
    source = FileSource(Path(files[0]).parent, files, range(len(files)), [("", "")] * len(files))
    return DaliLoader(config, (0, 1), source)


def open_chosen(config: LoaderConfig, indices: Sequence[int]) -> DaliLoader:
    """The loader of those images of the split of `config`, in that order, through its validation transform, whichever
    split that is. Raises DataError."""
    source = Chosen(open_source(config.data, config.split, **config.reading), indices)
    return DaliLoader(replace(config, split="val", prefetch=1), (0, 1), source)

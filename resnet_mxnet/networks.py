"""Loads trained networks, which can predict, embed, validate, export and quantise."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np

from common import plugins
from train.command_line import values_of
from train.commands import export, quantize, validate
from train.commands.validate import Validated
from train.errors import TrainError
from train.options.commands import ExportOptions, InferenceOptions, PredictOptions, QuantizeOptions, ValidateOptions
from train.pictures import predictions_html
from train.prediction import Prediction, Predictor, device_and_number, listed

Path = str | os.PathLike[str]


class Predictions(list[Prediction]):
    """A list of predictions. A notebook shows the predictions with their pictures."""

    def _repr_html_(self) -> str:
        return predictions_html(self)


def load(
    place: Path,
    *,
    int8: bool = InferenceOptions.int8,
    device: str = InferenceOptions.device,
    executor: str = InferenceOptions.executor,
    batch_size: int | None = None,
    num_threads: int = InferenceOptions.num_threads,
    hw_decoder_load: float = InferenceOptions.hw_decoder_load,
    max_pixels: int = InferenceOptions.max_pixels,
    plugin: Path | Sequence[Path] = (),
) -> TrainedNetwork:
    """Load a trained network.

        net = rm.load("runs/photos")
        with rm.load("resnet50.safetensors", device="gpu(1)") as net: ...

    Args:
        place: a run folder (its best checkpoint is used), a checkpoint, or weights of another program: .pth, .pt,
            .safetensors, Gluon's .params, an ONNX export of this program.
        int8: compute with the INT8 network that `quantize` has made from this network.
        device: "auto", "cpu", "gpu", or one of several GPUs, "gpu(1)". auto: the GPU if there is one that the executor
            can use.
        executor: "auto", "mxnet", "reference" or "cuda".
        batch_size: the largest number of images in a forward pass; None: 32, on a GPU 256.
        num_threads: threads that decode; 0: one for each core.
        hw_decoder_load: on a GPU, the share of JPEGs that its JPEG engine decodes; -1: DALI's default share.
        max_pixels: an image with more pixels counts as unreadable.
        plugin: files of plug-ins, if those of the network's run are no longer where they were.

    Raises:
        UserError: no weights are found, the weights are damaged, or the device is not available.
    """
    _check_place(place)
    kind, number = device_and_number(device)
    given = {"checkpoint": place, "int8": int8, "device": kind, "executor": executor, "batch_size": batch_size,
             "num_threads": num_threads, "hw_decoder_load": hw_decoder_load, "max_pixels": max_pixels, "plugin": plugin}
    with plugins.alone():
        options = InferenceOptions(**values_of(InferenceOptions, given, command="predict"))
        return TrainedNetwork(Predictor.load(options, number, may_raise_batch=batch_size is None))


def _check_place(place: Any) -> None:
    """Raise TrainError if `place` is not a path, or not a path that a file could have."""
    way_out = "give a run folder, a checkpoint or weights"
    if not isinstance(place, (str, os.PathLike)) or not os.fspath(place):
        raise TrainError(f"{place!r} is not the path of a trained network: {way_out}")
    try:
        os.stat(place)
    # reported later, with the kinds of files and folders that `load` accepts
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        raise TrainError(f"{place} cannot be read ({getattr(error, 'strerror', None) or error}): {way_out}") from None


class TrainedNetwork:
    """A trained network on a device; `load` makes one.

    Several networks may be open at the same time. Several threads may use one network, and then take turns. The
    device's memory is freed by `close`, at the end of a `with` block, or with the last reference.
    """

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor

    def __repr__(self) -> str:
        return (f"TrainedNetwork({self.place!r}: {self._predictor.trained.network}, {self.image_size} pixels, "
                f"{self.device})")

    @property
    def place(self) -> str:
        """The run folder or file that the network was loaded from."""
        return self._predictor.place

    @property
    def classes(self) -> list[str]:
        """The names of the classes, in the order of the network's outputs."""
        return list(self._predictor.trained.class_names)

    @property
    def image_size(self) -> int:
        """Height and width of the network's input, in pixels. Images of any size may be given."""
        return self._predictor.image_size

    @property
    def num_features(self) -> int:
        """The length C of the vectors of `embed`."""
        return self._predictor.num_features

    @property
    def device(self) -> str:
        """The device on which the network runs: "cpu(0)" or "gpu(1)"."""
        return self._predictor.prepared.placement.device

    def predict(self, images: Any, top: int = PredictOptions.top,
                on_bad_image: str = PredictOptions.on_bad_image) -> Any:
        """The most likely classes of one image or of several.

            net.predict("cat.jpg").best.name
            for prediction in net.predict(["cat.jpg", pixels, open("dog.png", "rb").read(), "photos/"]): ...

        Images are prepared as in the run's validation: turned upright by their EXIF orientation, resized (antialiased)
        so that the shorter side has `image_size / val_crop_fraction` pixels, cropped in the centre to `image_size` and
        normalised by the run's mean and standard deviation. Equal pixels give equal bits, as in the command `predict`.

        Args:
            images: one image: a path, the bytes of an image file, a uint8 array (height, width, 3) in RGB, or an image
                of Pillow's. Or several: an iterable of images, an array (N, height, width, 3), a folder (all images in
                it and its subfolders, by name), or a .txt file that lists image files. Sizes and kinds may be mixed.
            top: number of classes for each image; by default 5, or all if the network has fewer.
            on_bad_image: "error" raises for an image that cannot be read; "skip" gives a Prediction in its place that
                has an `error` and no guesses.

        Returns:
            For one image a `Prediction`, for several `Predictions`, a list in their order. `prediction.best` is the
            most likely class as a `Guess` with `name`, `index` and `probability`; `prediction.guesses` has all.

        Raises:
            UserError: an image cannot be read, `images` has no image, or `top` is larger than the network's number of
                classes.
        """
        if isinstance(top, bool) or not isinstance(top, (int, np.integer)):
            raise TrainError(f"top is {top!r}: give a whole number")
        single, is_one = _in_order(images)
        found = Predictions(self._predictor.predict(single, top, on_bad_image))
        return found[0] if is_one else found

    def embed(self, images: Any, on_bad_image: str = PredictOptions.on_bad_image) -> np.ndarray:
        """The features of images: what the network's classifier reads.

            features = net.embed("photos/")
            similarity = features @ net.embed("cat.jpg")

        Args:
            images: as in `predict`.
            on_bad_image: "error" raises for an image that cannot be read; "skip" fills its row with NaN.

        Returns:
            float32 (C,) for one image, (N, C) for several, in their order; C is `num_features`.

        Raises:
            UserError: an image cannot be read, `images` has no image, or the network is in INT8.
        """
        single, is_one = _in_order(images)
        found = self._predictor.embed(single, on_bad_image)
        return found[0] if is_one else found

    def validate(self, data: Path | None = None, **options: Any) -> Validated:
        """Measure loss and accuracy on labelled images. Also prints a line with the results.

            net.validate("photos").top1

        Args:
            data: images as for training, of which the validation images are used; None: those of the run.
            options: those of the command `validate`, such as `val_split`, `labels`, `report`.

        Returns:
            `Validated`, with `num_images`, `loss` (nats), `top1` and `top5` (fractions), `balanced_top1`, and
            `plugin_metrics` by name.

        Raises:
            UserError: the data cannot be read, or has other classes than the network.
        """
        own = self._predictor.options
        given = {"checkpoint": self.place, "int8": own.int8, "device": own.device, "executor": own.executor,
                 "plugin": own.plugin, "data": data} | options
        return validate.main(values_of(ValidateOptions, given, command="validate"), self._predictor.workers)

    def export_onnx(self, file: Path, *, features: bool = ExportOptions.features,
                    overwrite: bool = ExportOptions.overwrite) -> None:
        """Write the network as an ONNX file, and check it with ONNX Runtime.

            net.export_onnx("net.onnx")

        Args:
            file: the file to write: input `data` float32 (N, 3, image_size, image_size), output `probabilities` (N,
                classes). Its metadata say how an image becomes `data`.
            features: leave out the classifier: output `features` (N, C).
            overwrite: replace an existing file.

        Raises:
            UserError: the file exists or cannot be written, or onnx and onnxruntime are not installed.
        """
        own = self._predictor.options
        int8 = "onnxruntime" if own.int8 else ExportOptions.int8
        given = {"checkpoint": self.place, "onnx": file, "int8": int8, "features": features, "overwrite": overwrite,
                 "plugin": own.plugin}
        export.main(values_of(ExportOptions, given, command="export"))

    def quantize(self, **options: Any) -> TrainedNetwork:
        """Make an INT8 network from this network, on the CPU, and print the loss of accuracy. The INT8 network is
        written beside the checkpoint.

            small = net.quantize(images=512)

        Args:
            options: those of the command `quantize`: `data` (by default the run's), `calibration`, `images`,
                `float_first`, `int8_classifier`, `overwrite`, ...

        Returns:
            The INT8 network, loaded like this one. `load(place, int8=True)` loads it later.

        Raises:
            UserError: the checkpoint has an INT8 network already, or there are too few images.
        """
        own = self._predictor.options
        given = {"checkpoint": self.place, "plugin": own.plugin} | options
        quantize.main(values_of(QuantizeOptions, given, command="quantize"))
        return load(self.place, int8=True, device=own.device, plugin=own.plugin)

    def close(self) -> None:
        """Free the device's memory and all threads now. The network cannot be used afterwards."""
        self._predictor.close()

    def __enter__(self) -> TrainedNetwork:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _in_order(images: Any) -> tuple[list[Any], bool]:
    """Like `listed`, but raises UserError for images without an order."""
    if isinstance(images, str) and not images:
        raise TrainError("the path of the images is empty: give a file, a folder, or images")
    if isinstance(images, (Set, Mapping)):
        raise TrainError(f"a {type(images).__name__} is not a list of images: give a list; the results have its order")
    if hasattr(images, "read"):
        raise TrainError(f"images is an open file ({type(images).__name__}): give its path or its bytes")
    return listed(images)

"""Decorators of plug-ins: with these, a Python file outside this repository registers new parts.

    import resnet_mxnet as rm

    @rm.metric
    def margin(probabilities, labels):
        best_two = np.sort(probabilities)[:, -2:]
        return best_two[:, 1] - best_two[:, 0]

`python -m train --plugin margin.py` loads this file. docs/extending.md explains each kind step by step;
common/plugins.py says which files are executed, and how a run records them. This module imports no slow package.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from common import plugins
from train.options.optimizer import LOSSES, SCHEDULES

__all__ = ["augmentation", "callback", "loss", "metric", "model", "schedule"]

Made = TypeVar("Made", bound=Callable[..., Any])
HOOKS = {"on_run_start": ("run",), "on_epoch_end": ("epoch", "metrics"), "on_checkpoint": ("path",),
         "on_run_end": ("reason",)}

plugins.reserve("loss", LOSSES)
plugins.reserve("schedule", SCHEDULES)
_MEASURED = ("loss", "top1", "top5", "balanced_top1")
# The columns of an epoch (`EpochRow` of train/recording/metrics.py), which names of metrics must not repeat.
plugins.reserve("metric", (*_MEASURED, *(f"{images}_{name}" for images in ("train", "val", "train_eval")
                                         for name in (*_MEASURED, "count")),
                           "epoch", "hours", "images_per_sec", "skipped_images", "plugin_metrics"))


def model(function: Made | str) -> Any:
    """Register a network for `--model`: a function of the number of classes that returns an MXNet Symbol or a Gluon
    HybridBlock.

    A Symbol reads the variable `data`. The network may be NHWC or NCHW, and ends in the scores (N, num_classes), which
    a FullyConnected layer makes (Gluon: Dense), or a 1x1 convolution with pooling behind it; or in their softmax. Its
    name is the function's, or the one that is given: `@model("tiny_v2")`. The images have one size in training and may
    have another one in validation, so the network has global pooling before a FullyConnected layer.

        @rm.model("tiny_v2")
        def tiny(num_classes): ...

    Raises:
        UserError: the name exists already, or the function takes other arguments. Errors in the network itself are
            raised when it is built.
    """
    return _decorated("model", function, ("num_classes",))


def augmentation(function: Made | str) -> Any:
    """Register an augmentation for `--augment`: a function of `images` and `random` that returns the changed images.

    Both are nodes of the DALI graph. `images` are uint8 (height, width, RGB) on the CPU or on the GPU, cropped and
    resized to the network's input; the result has the same type and size. `random` are 8 numbers from 0 to 1 for each
    image, float32 on the CPU, which depend on the seed, the epoch and the image's place only: a run that is resumed
    gets them again. (The operators of `fn.random` have a state of their own, which no checkpoint holds.)

        @rm.augmentation("tilt")
        def turned(images, random): return fn.rotate(images, angle=40 * random[0] - 20, keep_size=True)

    Raises:
        UserError: the name exists already, or the function takes other arguments.
    """
    return _decorated("augmentation", function, ("images", "random"))


class Loss(NamedTuple):
    """What `loss` registers."""

    function: Callable[..., Any]
    probabilities: str


def loss(function: Made | str, probabilities: str = "softmax") -> Any:
    """Register a loss to train with, for `--loss`: a function of `scores` and `targets` that returns an MXNet Symbol,
    the loss (N,) of each image.

    Both are Symbols (N, C), float32: the scores of the classes, and what they should answer: 1 for the image's class
    and 0 for the others, after label smoothing, mixup and CutMix. The mean loss of a batch is learned, on every
    executor. The message for an unknown operator lists the known ones; sums, means and maxima are along axis=1.
    `probabilities` says what scores become in prediction: "softmax", or "sigmoid" for a loss that answers for each
    class by itself.

        @rm.loss("hinge", probabilities="sigmoid")
        def margins(scores, targets): return mx.sym.sum(mx.sym.relu(1 - scores * (2 * targets - 1)), axis=1)

    Raises:
        UserError: the name exists already, the function takes other arguments, or `probabilities` is something else.
            What is wrong with the loss itself is told before a run begins.
    """
    if probabilities not in ("softmax", "sigmoid"):
        raise plugins.fault(f"probabilities is {probabilities!r}: give 'softmax' or 'sigmoid'")
    return _decorated("loss", function, ("scores", "targets"), lambda made: Loss(made, probabilities))


def metric(function: Made | str) -> Any:
    """Register a metric: a NumPy function of `probabilities` (N, C) and `labels` (N,) int64 that returns N numbers, one
    for each image. Their mean over all images is recorded at each validation, and printed by `validate`.

        @rm.metric("surest")
        def largest(probabilities, labels): return probabilities.max(axis=1)

    Raises:
        UserError: the name exists already, or the function takes other arguments.
    """
    return _decorated("metric", function, ("probabilities", "labels"))


def schedule(function: Made | str) -> Any:
    """Register a schedule for `--schedule`: a function of the progress, which rises from 0 at the end of the warm-up to
    1 at the end of the run, that returns the factor on `--learning-rate`, 0 or more.

        @rm.schedule("linear")
        def falling(progress): return 1 - progress

    Raises:
        UserError: the name exists already, or the function takes other arguments.
    """
    return _decorated("schedule", function, ("progress",))


def callback(made: Any) -> Any:
    """Register a callback: a class (or an object) with some of these methods, or a function with one of these names.

        on_run_start(run)             run: train.callbacks.LiveRun, with folder, config and stop("why")
        on_epoch_end(epoch, metrics)  epoch: counted from 1; metrics: numbers by name, as in metrics.jsonl
        on_checkpoint(path)           path: the file, which is complete
        on_run_end(reason)            why the run ends: a key of train.recording.metrics.REASONS, such as "epochs"

    Process 0 of a run makes one object of the class, and is the only one that calls it. Each method may return True,
    or a sentence that says why, to stop the run after a checkpoint. An exception ends the run after a checkpoint too.

        rm.callback(Watch)  # or @rm.callback before the class

    Raises:
        UserError: it has none of these methods, another one that begins with on_, or one with other arguments.
    """
    is_function = inspect.isroutine(made)
    name = made.__name__ if is_function or inspect.isclass(made) else type(made).__name__
    hooks = {name: made} if is_function else {each: getattr(made, each) for each in dir(made) if each[:3] == "on_"}
    known = ", ".join(HOOKS)
    if not hooks:
        raise plugins.fault(f"the callback {name} has none of the methods {known}: add one")
    for hook, function in hooks.items():
        if hook not in HOOKS:
            raise plugins.fault(f"the callback {name} has {hook}, which is never called: the hooks are {known}")
        _check_arguments(f"{hook} of the callback {name}", function, HOOKS[hook], is_method=inspect.isclass(made))
    plugins.register("callback", name, made, key=name if hasattr(made, "__name__") else f"{name} {id(made)}")
    return made


def _decorated(kind: str, function: Made | str, arguments: tuple[str, ...],
               form: Callable[[Any], Any] = lambda made: made) -> Any:
    """Register `function` under its own name. If it is a name instead, return the decorator that registers a function
    under this name. `form` makes the object that is registered from the function."""

    def register(decorated: Made, name: str) -> Made:
        _check_arguments(f"the {kind} {name}", decorated, arguments)
        plugins.register(kind, name, form(decorated))
        return decorated

    if isinstance(function, str):
        return lambda decorated: register(decorated, function)
    name = getattr(function, "__name__", "")
    if not name and callable(function):  # an object, or functools.partial
        raise plugins.fault(f'{function!r} has no name: give one, as in rm.{kind}("mine")(...)')
    return register(function, name or repr(function))


def _check_arguments(what: str, function: Callable[..., Any], arguments: tuple[str, ...], is_method: bool = False
                     ) -> None:
    """Raise UserError unless it is a function that accepts this number of arguments."""
    if not callable(function):
        raise plugins.fault(f"{what} is not a function: define one with def, taking {' and '.join(arguments)}")
    try:
        signature = inspect.signature(function)
        signature.bind(*[None] * (len(arguments) + is_method))
    except ValueError:  # a builtin without a signature
        return
    except TypeError:
        raise plugins.fault(f"{what} takes {signature}, and is called with {' and '.join(arguments)}: change its "
                            "arguments") from None

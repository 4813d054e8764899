"""The callbacks of plug-ins. The training loop calls the callbacks in process 0; a callback may ask to stop the run.

An exception in a callback ends the run after a checkpoint. The message names the file and line of the exception.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from common import plugins
from common.errors import ProgramError
from common.plugins import Registered
from train.config import Config
from train.errors import TrainError
from train.plugins import HOOKS
from train.processes.signals import StoppedBySignal

# Horovod's exceptions that end a session of an elastic run; the next session continues (compared by class name, as in
# distributed.py).
SESSION_ENDS = ("HorovodInternalError", "HostsUpdatedInterrupt")
ON_CHECKPOINT = "on_checkpoint"


@dataclass
class LiveRun:
    """The object that callbacks get to read and stop a run."""

    folder: Path
    config: dict[str, Any]  # the options by name, as in config.json
    class_names: list[str]
    num_processes: int
    _stop: str = field(default="", repr=False)

    def stop(self, why: str) -> None:
        """End the run after the current step, with a checkpoint. `why` is printed and recorded; if several reasons are
        given, the first is kept. Any thread may call this method.
        """
        self._stop = self._stop or why

    @property
    def reason(self) -> str:
        """The reason for which a callback wants the run to end; "" if no callback wants that."""
        return self._stop


class Wish(NamedTuple):
    """The request of process 0's callbacks to end the run, for a `reason` or because a callback has failed."""

    reason: str = ""
    failure: str = ""


def check_callbacks(callbacks: Any) -> None:
    """Raise TrainError for objects that `Callbacks.add` cannot call."""
    if not isinstance(callbacks, (list, tuple)):
        raise TrainError(f"callbacks={callbacks!r} is not a list: give a list of functions, as in "
                             "callbacks=[stop_early]")
    for made in callbacks:
        if any(hasattr(made, hook) for hook in HOOKS):
            continue
        arguments = HOOKS.get(getattr(made, "__name__", ""), HOOKS["on_epoch_end"])
        try:
            inspect.signature(made).bind(*arguments)
        except (TypeError, ValueError):
            raise TrainError(f"the callback {made!r} cannot be called with {' and '.join(arguments)}: give a function "
                             f"of these, or an object with one of the methods {', '.join(HOOKS)}") from None


class _Failed(Exception):
    """A callback has failed; the message is a sentence."""


class Callbacks:
    """The callbacks of a run's plug-ins. In processes other than the first, their methods do nothing."""

    def __init__(self, config: Config, run: LiveRun, is_first: bool) -> None:
        self._run = run
        self._registered = plugins.active("callback", config.plugin)
        self._is_first = is_first
        self._made: dict[type, Any] = {}  # callback objects
        self._failure = ""

    def add(self, callbacks: Iterable[Any]) -> None:
        """Add callbacks of the program that started the run, which must be the same in all processes. A callback is an
        object that `train.plugins.callback` accepts, or a function with any name, called at the end of each epoch."""
        for made in callbacks:
            name = getattr(made, "__name__", type(made).__name__)
            code = getattr(made, "__code__", None)
            file, line = (code.co_filename, code.co_firstlineno) if code else (name, 0)
            self._registered.append(Registered("callback", name, made, file, line, ""))

    def __bool__(self) -> bool:
        """Whether there are any callbacks; equal in all processes."""
        return bool(self._registered)

    @property
    def hear_checkpoints(self) -> bool:
        """Whether any callback has the hook for checkpoints; equal in all processes."""
        return any(hasattr(each.made, ON_CHECKPOINT) or each.name == ON_CHECKPOINT for each in self._registered)

    @property
    def wish(self) -> Wish:
        return Wish(self._run.reason, self._failure)

    @property
    def is_to_stop(self) -> bool:
        """Whether this process's callbacks want the run to end."""
        return any(self.wish)

    def start(self) -> None:
        """Tell the callbacks that a session of the run begins."""
        self._call("on_run_start", self._run)

    def end_epoch(self, epoch: int, metrics: Mapping[str, float]) -> None:
        self._call("on_epoch_end", epoch, dict(metrics))

    def saved(self, path: Path) -> None:
        """Tell the callbacks that a checkpoint has been written."""
        self._call(ON_CHECKPOINT, path)

    def end(self, reason: str) -> None:
        self._call("on_run_end", reason)

    @contextlib.contextmanager
    def reporting_failures(self) -> Iterator[None]:
        """A context in which the run trains. Reports a signal or an error that ends the run to the callbacks. If a
        callback then fails, only the callback's name is printed, because the run's own error matters more.
        """
        try:
            yield
        except BaseException as error:
            if type(error).__name__ in SESSION_ENDS:
                raise
            before = self._failure
            self.end("signal" if isinstance(error, (StoppedBySignal, KeyboardInterrupt)) else "error")
            if self._failure != before:
                print(self._failure, file=sys.stderr, flush=True)
            raise

    def _call(self, hook: str, *arguments: Any) -> None:
        """Call a hook of all callbacks. The first failure is kept in `wish`; only `on_run_end` is called after it."""
        for each in self._registered if self._is_first else ():
            if self._failure and hook != "on_run_end":
                return
            try:
                answer = self._answer(each, hook, arguments)
            except _Failed as failure:
                self._failure = self._failure or str(failure)
            else:
                if answer:
                    self._run.stop(answer)

    def _answer(self, each: Registered, hook: str, arguments: tuple[Any, ...]) -> str:
        """The return value of a callback's hook; "" if the callback lacks the hook. Raises _Failed."""
        try:
            function = self._function(each, hook)
            answer = plugins.call(each, *arguments, what=function) if function else None
        except ProgramError as error:
            raise _Failed(str(error)) from None
        if answer is True:
            return f"{each.name} asked for it"
        if answer and not isinstance(answer, str):
            raise _Failed(f"{hook} of the callback {each.name} ({each.place}) returned {answer!r}: return nothing, "
                          "True to stop the run, or a sentence that says why it is to stop")
        return answer or ""

    def _function(self, each: Registered, hook: str) -> Callable[..., Any] | None:
        """A callback's function for a hook; None if the callback lacks the hook."""
        if inspect.isroutine(each.made):
            own = each.name if each.name in HOOKS else "on_epoch_end"
            return each.made if own == hook else None
        if not inspect.isclass(each.made):
            return getattr(each.made, hook, None)
        if each.made not in self._made:
            self._made[each.made] = plugins.call(each)
        return getattr(self._made[each.made], hook, None)

"""Plug-ins: Python files of a user, or installed packages, that extend this program by decorators (`train/plugins.py`).

    records = load(["my.py"])                 # executes the file, whose decorators call `register`
    find("model", "tiny").made(10)
    restore(records, "runs/my-run")           # in a later process: the same files, if they are unchanged

A run records each plug-in as FILE#sha256=DIGEST, where FILE is an absolute path, and keeps a copy of the file. Only
files that the user names, or has named before on this account (by SHA-256), are executed. A data file, such as a
network in ONNX, may be given in place of a plug-in (`add_data_format`). This module imports no slow package.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common.command_line import nearest
from common.content import first_line
from common.disk_cache import default_folder
from common.errors import ProgramError, UserError

WALKS = "docs/extending.md"
GROUP = "resnet_mxnet.plugins"  # the group of entry points by which installed packages offer plug-ins
# A run's FOLDER holds copies of its plug-ins, each in a folder named by its digest. The cache's FOLDER holds an empty
# file for each digest that the user has named.
FOLDER = "plugins"
_PIN = "#sha256="
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_DECORATORS = (__file__, str(Path(__file__).parents[1] / "train" / "plugins.py"))


class Registered(NamedTuple):
    """An object that a plug-in has registered."""

    kind: str  # "model", "metric", ...
    name: str
    made: Any  # the function, class or object
    file: str
    line: int  # 0: the whole file
    record: str  # record of the plug-in; "" if the program itself has registered the object

    @property
    def place(self) -> str:
        """The object's file and line, for messages."""
        return f"{self.file}:{self.line}" if self.line else self.file


class _Loaded(NamedTuple):
    record: str
    content: bytes
    is_named: bool  # True: the user named the plug-in in this call; False: a run's record named it


class _DataFormat(NamedTuple):
    register: Callable[[str, bytes], None]
    read: Callable[[Path], bytes]


_registered: dict[tuple[str, str], Registered] = {}
_reserved: dict[str, set[str]] = {}  # kind -> names that no plug-in may take
_loaded: dict[str, _Loaded] = {}  # by the file name of the plug-in, or the name of its entry point
_told: set[tuple[str, str]] = set()  # pairs of records whose difference has been reported already
_loading: list[str] = []  # records of the plug-ins that are being executed
_lock = threading.RLock()
_data_formats: dict[str, _DataFormat] = {}  # by the suffix of a file name


# --- registration ---


def register(kind: str, name: str, made: Any, key: str = "", data_file: str = "") -> None:
    """Register an object; the decorators call this function. `key` identifies objects that are never chosen by name, so
    that several plug-ins may use the same name. `data_file`: the file that contains the object, if it is data instead
    of code. Raises UserError if the name is invalid or already taken.
    """
    file, line = (data_file, 0) if data_file else _caller()
    if not is_name(name):
        raise fault(f"{name!r} is not a valid name for a {kind}: give letters, digits, '_', '-' and '.'")
    record = _loading[-1] if _loading else ""
    key = f"{record} {key}" if key else name
    before = _registered.get((kind, key))
    if before and before.record and _is_of_earlier_call(before.record):
        _forget(before.record)
    elif before and (record or before.record):  # a notebook cell may be run again
        raise fault(f"the {kind} {name!r} exists already, at {before.place}: give it another name")
    if name in _reserved.get(kind, ()):
        raise fault(f"the {kind} {name!r} exists already, in this program: give it another name")
    _registered[kind, key] = Registered(kind, name, made, file, line, record)


def is_name(name: str) -> bool:
    """Whether the name is valid for a registered object."""
    return bool(_NAME.fullmatch(name))


def fault(sentence: str) -> UserError:
    """The error of a decorator, with the file and line of the decorator."""
    file, line = _caller()
    return UserError(f"{file}:{line}: {sentence}")


def add_data_format(ending: str, register_content: Callable[[str, bytes], None],
                    read: Callable[[Path], bytes] = Path.read_bytes) -> None:
    """Declare that files ending in `ending` are data, which is never executed.

    `register_content` is called with the path and the content of a file, and registers the objects in the content.
    `read` returns the content, including everything needed from other files, and may raise OSError and UserError.
    """
    _data_formats[ending] = _DataFormat(register_content, read)


def reserve(kind: str, names: Iterable[str]) -> None:
    """Reserve names of a kind that this program uses itself, so that plug-ins cannot take them."""
    _reserved.setdefault(kind, set()).update(names)


def names(kind: str) -> list[str]:
    """The names of all registered objects of a kind."""
    return [name for of, name in _registered if of == kind]


def find(kind: str, name: str) -> Registered | None:
    """The object registered under that name, if any."""
    return _registered.get((kind, name))


def get(kind: str, name: str, own: Sequence[str] = ()) -> Registered:
    """Like `find`, but raises UserError, with the nearest name, if no object has the name. `own`: names that the
    program itself defines.
    """
    found = find(kind, name)
    if not found:
        known = [*own, *names(kind)]
        way_out = nearest(name, known) if known else f": load the plug-in that has it with --plugin ({WALKS})"
        raise UserError(f"there is no {kind} {name!r}{way_out}")
    return found


def active(kind: str, records: Sequence[str]) -> list[Registered]:
    """All objects of a kind that the plug-ins `records`, or the program itself, have registered."""
    return [each for each in _registered.values() if each.kind == kind and each.record in ("", *records)]


def has(kind: str, name: str, records: Sequence[str]) -> bool:
    """Whether one of the plug-ins `records`, or what the user has named in its place, has registered this object."""
    found = find(kind, name)
    if not found or found.record in ("", *records):
        return found is not None
    return _loaded[name_of(found.record)].is_named and name_of(found.record) in map(name_of, records)


def call(each: Registered, *arguments: Any, what: Callable[..., Any] | None = None) -> Any:
    """Call a registered object, or its method `what`. An exception becomes a UserError with the file and line that
    raised it.
    """
    try:
        return (what or each.made)(*arguments)
    except ProgramError:
        raise
    except Exception as error:
        raise UserError(f"the {each.kind} {each.name} failed at {_where(error, each.file)}: {_said(error)}") from error


def _caller() -> tuple[str, int]:
    """File and line of the code that has called a decorator."""
    frame = sys._getframe()
    while frame.f_back and frame.f_code.co_filename in _DECORATORS:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def _where(error: BaseException, file: str) -> str:
    """The last line of `file` in an exception's traceback; the line that raised the exception if `file` is not in the
    traceback.
    """
    frames = traceback.extract_tb(error.__traceback__)
    frame = ([frame for frame in frames if frame.filename == file] or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"


def _said(error: BaseException) -> str:
    first = first_line(error)
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


# --- loading ---


def load(words: Sequence[str]) -> tuple[str, ...]:
    """Load the plug-ins that the user has named, and return their records.

    A word is a file, an entry point of the group `resnet_mxnet.plugins`, or a record; the file of a record must have
    the recorded digest. A loaded plug-in is executed again only if its file has changed. Raises UserError.
    """
    records: list[str] = []
    for word in words:
        file, digest = _parts(word)
        record, content, execute = _found(file)
        if digest and digest != _parts(record)[1]:
            raise UserError(f"the {_word(file)} {file} has changed: its sha256 is {_parts(record)[1][:8]}..., not "
                            f"{digest[:8]}...; give --plugin {file} to use it as it is now")
        twin = _loaded.get(name_of(record))
        if twin and twin.is_named and not {*_parts(twin.record)} & {*_parts(record)}:
            raise UserError(f"the {_word(record)}s {_parts(twin.record)[0]} and {file} have the same name, but a run "
                            "finds them by name: rename one of the two files")
        _load(record, content, execute, is_named=True)
        _remember(record)
        records.append(record)
    return tuple(dict.fromkeys(records))


def begin_call() -> None:
    """What the user has named in earlier calls of the library no longer replaces what a run has recorded."""
    for name, each in _loaded.items():
        _loaded[name] = each._replace(is_named=False)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside, no other thread is here, which could load a plug-in with the same names."""
    with _lock:
        yield


@contextlib.contextmanager
def forgotten() -> Iterator[None]:
    """Forget, at the end of the block, all plug-ins loaded inside it, so that one training does not see the plug-ins of
    another.
    """
    registered, loaded = dict(_registered), dict(_loaded)
    try:
        yield
    finally:
        _registered.clear()
        _registered.update(registered)
        _loaded.clear()
        _loaded.update(loaded)


@contextlib.contextmanager
def known_again(found: Iterable[Registered | None]) -> Iterator[None]:
    """Give registered objects their names back inside the block: other objects of these names may have replaced them
    since. None stands for an object that no plug-in has.
    """
    with alone():
        now = dict(_registered)
        _registered.update({(each.kind, each.name): each for each in found if each})
        try:
            yield
        finally:
            _registered.clear()
            _registered.update(now)


def restore(records: Sequence[str], place: str, run_folder: str = "",
            is_enough: Callable[[], bool] = lambda: False) -> None:
    """Load the plug-ins recorded by a run or checkpoint at `place`, until `is_enough()` is true. A plug-in that the
    user has named replaces a recorded plug-in with the same file name; a difference between the two is reported.

    If a plug-in's file is missing or has changed, its copy in `run_folder` is executed, and a message reports this.
    Raises UserError if the copy is missing too, or if the user of this account has never named this content.
    """
    for record in records:
        loaded = _loaded.get(name_of(record))
        if loaded and loaded.is_named and loaded.record != record:
            _tell_of_change(record, loaded.record, place)
        elif not (loaded and loaded.record == record) and not is_enough():
            found, content, execute = _recorded(record, place, run_folder)
            _load(record, content, execute, is_named=False)
            is_copy = found != _parts(record)[0]
            _tell(f"{_word(record)} {found}, as {place} records it"
                  + f" ({_parts(record)[0]} is missing or has changed; --plugin replaces it)" * is_copy)


def together(recorded: Sequence[str], given: Sequence[str]) -> tuple[str, ...]:
    """The plug-ins of a run: a given plug-in replaces the recorded plug-in with the same file name."""
    return tuple({name_of(record): record for record in (*recorded, *given)}.values())


def name_of(record: str) -> str:
    """The name of a plug-in in a run: the name of its file or of its entry point."""
    return Path(_parts(record)[0]).name


def brief(record: str) -> str:
    """A record in short form: the file, and the beginning of its digest."""
    file, digest = _parts(record)
    return f"{file} (sha256 {digest[:8]}...)"


def keep(records: Sequence[str], run_folder: Path, write: Callable[[Path, bytes], None]) -> None:
    """Copy the plug-ins' files into a run's folder, using `write`. Plug-ins of installed packages are not copied."""
    for record in records:
        loaded = _loaded.get(name_of(record))
        if loaded and loaded.record == record and os.path.isabs(record):
            copy = _copy(record, run_folder)
            if not copy.exists():
                write(copy, loaded.content)


def _copy(record: str, run_folder: str | Path) -> Path:
    return Path(run_folder) / FOLDER / _parts(record)[1][:8] / name_of(record)


def _parts(record: str) -> tuple[str, str]:
    """File and digest of a record; the digest is "" for a file without a recorded digest."""
    file, pin, digest = record.rpartition(_PIN)
    return (file, digest) if pin else (record, "")


def _record(file: str, content: bytes) -> str:
    return f"{file}{_PIN}{hashlib.sha256(content).hexdigest()}"


def _installed() -> dict[str, importlib.metadata.EntryPoint]:
    """The plug-ins of installed packages."""
    return {entry.name: entry for entry in importlib.metadata.entry_points(group=GROUP)}


def _found(word: str) -> tuple[str, bytes, Callable[[], None]]:
    """A plug-in by its file or entry point: its record, its content, and the function that executes it."""
    path = Path(word)
    if path.is_file():
        execute, read = _data_formats.get(path.suffix.lower(), _DataFormat(_execute, Path.read_bytes))
        try:
            content = read(path)
        except OSError as error:
            raise UserError(f"the plug-in {word} cannot be read ({error.strerror}): check its permissions") from None
        file = os.path.abspath(word)
        return _record(file, content), content, lambda: execute(file, content)
    entries = _installed()
    if word in entries:
        entry = entries[word]
        content = _content_of_module(entry.module)
        return _record(word, content), content, lambda: _import(entry)
    known = f" (installed are: {', '.join(sorted(entries))})" if entries else ""
    raise UserError(f"--plugin {word}: there is no such file, and no installed plug-in of that name{known}; check the "
                    "path")


def _recorded(record: str, place: str, run_folder: str) -> tuple[str, bytes, Callable[[], None]]:
    """Find a recorded plug-in. Returns the current place of its recorded content, the content, and the function that
    executes it.

    Raises UserError if the content no longer exists, or if the user of this account has never named a plug-in with this
    content: a run folder from somebody else may contain any code.
    """
    file, _ = _parts(record)
    copy = str(_copy(record, run_folder)) if run_folder else ""
    is_there = os.path.isfile(file) if os.path.isabs(file) else file in _installed()
    for candidate in [file] * is_there + [copy] * os.path.isfile(copy):
        try:
            found, content, execute = _found(candidate)
        except UserError:  # for example, the other file with the weights of a network file is gone
            if candidate != copy and os.path.isfile(copy):
                continue
            raise
        if _parts(found)[1] == _parts(record)[1]:
            if not _is_data(found) and not _is_known(found):
                raise UserError(f"{place} needs the plug-in {candidate}, which has not been used on this account yet: "
                                f"read it first, since it runs with all your rights, then give --plugin {candidate} "
                                f"({WALKS})")
            return candidate, content, execute
    if is_there:
        raise UserError(f"the {_word(file)} {file} has changed since {place} recorded it ({brief(record)}): give "
                        f"--plugin {file} to use it as it is now")
    way_out = f"or install its package ({WALKS})" if not _is_data(record) else "or copy it there"
    raise UserError(f"{place} needs the {_word(file)} {file}, which is not there: give its new path with --plugin, "
                    f"{way_out}")


def _is_data(record: str) -> bool:
    return Path(_parts(record)[0]).suffix.lower() in _data_formats


def _word(record: str) -> str:
    """The plug-in's name in messages."""
    return "network file" if _is_data(record) else "plug-in"


def _is_known(record: str) -> bool:
    """Whether the user of this account has named a plug-in with this content before."""
    folder = default_folder()
    return folder is not None and (folder / FOLDER / _parts(record)[1]).exists()


def _remember(record: str) -> None:
    """Remember that the user has named this content. If that cannot be stored, the user must name the content again
    next time.
    """
    if folder := default_folder():
        with contextlib.suppress(OSError):
            (folder / FOLDER).mkdir(parents=True, exist_ok=True)
            (folder / FOLDER / _parts(record)[1]).touch()


def _load(record: str, content: bytes, execute: Callable[[], None], is_named: bool) -> None:
    """Execute a plug-in that is not loaded yet. It replaces a loaded plug-in with the same name. Raises UserError."""
    name = name_of(record)
    if name in _loaded and _loaded[name].record == record:
        _loaded[name] = _loaded[name]._replace(is_named=is_named or _loaded[name].is_named)
        return
    before, loaded_before = dict(_registered), dict(_loaded)
    if name in _loaded:
        _forget(_loaded[name].record)
    _loading.append(record)
    try:
        execute()
        if not any(each.record == record for each in _registered.values()):
            raise UserError(f"the plug-in {_parts(record)[0]} registers nothing: put a decorator such as @model before "
                            f"each thing that it adds ({WALKS})")
    except BaseException:
        _registered.clear()
        _registered.update(before)
        _loaded.update(loaded_before)
        raise
    finally:
        _loading.pop()
    _loaded[name] = _Loaded(record, content, is_named)


def _is_of_earlier_call(record: str) -> bool:
    """Whether a plug-in is there only because an earlier call of this process, or another run, has loaded it."""
    loaded = _loaded.get(name_of(record))
    return bool(loaded and loaded.record == record and not loaded.is_named)


def _forget(record: str) -> None:
    """Undo the loading of a plug-in."""
    for key in [key for key, each in _registered.items() if each.record == record]:
        del _registered[key]
    del _loaded[name_of(record)]


def _execute(file: str, content: bytes) -> None:
    module = types.ModuleType(f"plugin_{re.sub(r'[^0-9A-Za-z_]', '_', Path(file).stem)}")
    module.__file__ = file
    sys.modules[module.__name__] = module  # dataclasses look up their module in sys.modules
    with _named_failure(file):
        exec(_compiled(content, file), vars(module))


def _compiled(content: bytes, file: str) -> types.CodeType:
    try:
        return compile(content, file, "exec")
    except ValueError as error:  # the source has null bytes; from Python 3.12 on they raise a SyntaxError
        raise SyntaxError(str(error), (file, 1, None, None)) from None


def _import(entry: importlib.metadata.EntryPoint) -> None:
    for name in [entry.module, *(name for name in sys.modules if name.startswith(f"{entry.module}."))]:
        # a module that is already imported would otherwise not be executed, and register nothing
        sys.modules.pop(name, None)
    with _named_failure(entry.module):
        entry.load()


def _content_of_module(module: str) -> bytes:
    with _named_failure(module):
        spec = importlib.util.find_spec(module)
        if not (spec and spec.origin and os.path.isfile(spec.origin)):
            raise ImportError("it has no Python file")
        return Path(spec.origin).read_bytes()


@contextlib.contextmanager
def _named_failure(file: str) -> Iterator[None]:
    """A context in which a plug-in is executed; its exceptions become UserErrors with file and line."""
    try:
        yield
    except ProgramError:
        raise
    except SyntaxError as error:
        raise UserError(f"the plug-in {error.filename or file}:{error.lineno or 1} is not valid Python ({error.msg}): "
                        "correct that line") from None
    except (Exception, SystemExit) as error:
        raise UserError(f"the plug-in failed at {_where(error, file)}: {_said(error)}") from error


def _tell_of_change(recorded: str, named: str, place: str) -> None:
    """Report, once, that the plug-in that the user has named differs from the recorded plug-in."""
    if _parts(named)[1] != _parts(recorded)[1] and (recorded, named) not in _told:
        _told.add((recorded, named))
        _tell(f"the {_word(named)} {brief(named)} is used, although {place} was made with {brief(recorded)}")


def _tell(sentence: str) -> None:
    """Print the sentence in one process only, not in each process of a run."""
    if os.environ.get("HOROVOD_RANK", "0") == "0":
        print(sentence, file=sys.stderr, flush=True)

"""A disk cache for results that are slow to compute: compiled kernels, cuDNN plans, loader settings, indexes.

Files lie in `$RESNET_CACHE`, else `$XDG_CACHE_HOME/resnet-mxnet`, else `~/.cache/resnet-mxnet`. The folder's name holds
everything that its entries depend on (GPU, versions of driver and libraries), so an entry made on another configuration
is never read.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import re
import tempfile
from pathlib import Path

_MAGIC = b"resnet-mxnet cache 1\n"
log = logging.getLogger("disk_cache")


def default_folder() -> Path | None:
    """The folder of the cache. None if there is no home folder: $HOME is not set, and the system does not know the
    user, as in some containers.
    """
    if folder := os.environ.get("RESNET_CACHE"):
        return Path(folder)
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if caches.is_absolute():  # the XDG standard says to ignore relative paths
        return caches / "resnet-mxnet"
    home = os.path.expanduser("~")
    return None if home == "~" else Path(home, ".cache", "resnet-mxnet")


@functools.cache
def _say_that_nothing_is_kept() -> None:
    log.warning("there is no home folder for the cache: set RESNET_CACHE to a folder, or every start will be slow")


class Cache:
    """Named byte strings in one folder. A damaged entry counts as absent, with a warning. If the folder cannot be
    written, results are computed again.
    """

    def __init__(self, holds_for: str, root: Path | None = None) -> None:
        place = root or default_folder()
        self.folder = place and place / re.sub(r"[^\w.+-]+", "_", holds_for)

    def read(self, name: str) -> bytes | None:
        if not self.folder:
            return None
        path = self.folder / name
        try:
            content = path.read_bytes()
        except OSError:
            return None
        head, body = content[: len(_MAGIC) + 32], content[len(_MAGIC) + 32 :]
        if head != _MAGIC + hashlib.sha256(body).digest():
            log.warning("the cache file %s is damaged: it is made anew", path)
            return None
        return body

    def write(self, name: str, body: bytes) -> None:
        """Write an entry atomically: a process that reads meanwhile gets the whole old entry or the whole new entry."""
        if not self.folder:
            return _say_that_nothing_is_kept()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=self.folder)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(_MAGIC + hashlib.sha256(body).digest() + body)
                os.replace(temporary, self.folder / name)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
        except OSError as error:
            log.warning("the cache folder %s cannot be written (%s): the next start will be slower",
                        self.folder, error.strerror)

"""Versions of libraries that pip does not know of."""

from __future__ import annotations

from importlib import metadata

import pytest

from mxnet_compat import mx
from train import environment


def test_versions_of_a_copied_mxnet(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    known = environment.versions()
    assert known.keys() >= {"python", "os", "numpy"}
    monkeypatch.setattr(metadata, "version", unknown)
    copied = environment.versions()
    assert copied["mxnet"] == mx.__version__ and "numpy" not in copied

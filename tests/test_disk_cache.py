"""The cache on disk: an entry is read back completely or not at all."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from common import disk_cache
from common.disk_cache import Cache, default_folder


def test_a_damaged_cache_entry_counts_as_absent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = Cache("NVIDIA H200 / driver 13000", tmp_path)
    assert cache.read("plans") is None
    cache.write("plans", b"content")
    assert cache.read("plans") == b"content" and Cache("another GPU", tmp_path).read("plans") is None
    path = next(cache.folder.iterdir())
    for damage in (b"", b"foreign", path.read_bytes()[:-1], path.read_bytes()[:-1] + b"x"):
        path.write_bytes(damage)
        with caplog.at_level(logging.WARNING):
            assert cache.read("plans") is None
        assert "damaged" in caplog.text
    cache.write("plans", b"new")
    assert cache.read("plans") == b"new"


def test_a_cache_folder_that_cannot_be_written_only_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        Cache("gpu", tmp_path / "file").write("plans", b"content")
    assert "cannot be written" in caplog.text


@pytest.mark.parametrize("variables, folder", [
    ({"RESNET_CACHE": "mine", "XDG_CACHE_HOME": "/caches", "HOME": "/home/me"}, "mine"),
    ({"XDG_CACHE_HOME": "/caches", "HOME": "/home/me"}, "/caches/resnet-mxnet"),
    ({"XDG_CACHE_HOME": "caches", "HOME": "/home/me"}, "/home/me/.cache/resnet-mxnet"),
    ({"XDG_CACHE_HOME": "", "HOME": "/home/me"}, "/home/me/.cache/resnet-mxnet"),
    ({}, None),
])
def test_where_the_cache_is(variables, folder, monkeypatch):
    for name in ("RESNET_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 5)  # a user unknown to the system
    assert default_folder() == (folder and Path(folder))


def test_without_a_home_nothing_is_kept_and_that_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(disk_cache, "default_folder", lambda: None)
    disk_cache._say_that_nothing_is_kept.cache_clear()
    for name in ("a", "b"):
        cache = Cache("something")
        cache.write(name, b"content")
        assert cache.read(name) is None
    assert [record.message for record in caplog.records] == [
        "there is no home folder for the cache: set RESNET_CACHE to a folder, or every start will be slow"]

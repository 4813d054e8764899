"""Files with changed bytes: one sentence, whatever exception a library raises, and little memory and time."""

from __future__ import annotations

import os
import re
import struct
import zipfile

import numpy as np
import pytest

from common.mxnet_compat import mx
from graph_passes import Graph, GraphError
from train import TrainError, checkpoint, models
from train.checkpoint import Checkpoint
from train.commands.export import mxnet_params
from train.config import Config
from train.recording.metrics import RunRecord
from train.weights import files, params_file, safetensors_file

pytestmark = pytest.mark.usefixtures("narrow_network")


def rezipped(path, change):
    """The zip with the content of its first member changed, and a matching checksum."""
    with zipfile.ZipFile(path) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    with zipfile.ZipFile(path, "w") as archive:
        for number, (name, value) in enumerate(members):
            archive.writestr(name, value if number else change(value))


def central(content, offset):
    """The offset of a field in the first entry of a zip's central directory."""
    return content.index(b"PK\x01\x02") + offset


def compression(path):
    content = bytearray(path.read_bytes())
    content[central(content, 10)] = 9
    path.write_bytes(content)


def encryption(path):
    content = bytearray(path.read_bytes())
    content[central(content, 8)] |= 1
    path.write_bytes(content)


def array_header(path):
    rezipped(path, lambda value: value.replace(b"'fortran_order': False, ", b"'fortran_order': (((((((( "))


def array_shape(path):
    rezipped(path, lambda value: re.sub(rb"'shape': \([^)]*\)", lambda match: b"'shape': (9999999999,)".ljust(
        len(match[0])), value))


@pytest.mark.parametrize("damage", [compression, encryption, array_header, array_shape])
def test_changed_zip_of_a_checkpoint(tmp_path, damage):
    path = tmp_path / "step-00000001.npz"
    params, aux = models.create("resnet18", 3).initial_values(0)
    checkpoint.save(Checkpoint(params, aux, {}, Config(model="resnet18"), list("abc")), path)
    damage(path)
    with pytest.raises(TrainError, match=r"step-00000001.npz is not a complete checkpoint \(.+\); use another c"):
        checkpoint.load(path)


@pytest.mark.long
def test_any_changed_byte_of_a_checkpoint_is_a_sentence(tmp_path, seed):
    """A changed byte is refused in one sentence, or has no effect, because it is in a time or in a name that nobody
    reads."""
    path, random = tmp_path / "step-00000001.npz", np.random.default_rng(seed)
    few = {"one": np.arange(6, dtype=np.float32).reshape(2, 3)}
    checkpoint.save(Checkpoint(few, few, {}, Config(model="resnet18"), list("abc")), path)
    content, refused = path.read_bytes(), 0
    for place in random.integers(0, len(content), 1000):
        changed = bytearray(content)
        changed[place] ^= 1 << random.integers(8)
        path.write_bytes(changed)
        try:
            checkpoint.load(path)
        except TrainError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 500


def test_a_line_of_metrics_that_is_no_utf8(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"event": "no\xff"}\n')
    with pytest.raises(TrainError, match=r"line 1 of .*metrics.jsonl is not a line of a run's metrics \('.*xff.*d"):
        RunRecord.read_jsonl(path)


@pytest.fixture
def params(tmp_path):
    path = tmp_path / "network.params"
    path.write_bytes(mxnet_params({"arg:one": np.arange(6.0).reshape(2, 3), "aux:two": np.ones(4)}))
    return path


def test_parameter_files_of_all_versions(tmp_path, params):
    params_file.check(params)
    assert files.read(params)[0].keys() == {"one", "two"}
    values, whole = np.float32([1, 2]).tobytes(), struct.pack("<ii", 1, 0) + struct.pack("<i", 0)
    for name, array in {
        "1": struct.pack("<Iiq", 0xF993FAC8, 1, 2) + whole + values,
        "before": struct.pack("<II", 1, 2) + whole + values,
        "nothing": struct.pack("<Iii", 0xF993FAC9, 0, 0),
    }.items():
        path = tmp_path / f"{name}.params"
        path.write_bytes(struct.pack("<QQQ", 0x112, 0, 1) + array + struct.pack("<QQ", 1, 1) + b"a")
        params_file.check(path)
        if name != "nothing":
            assert mx.nd.load(str(path))["a"].asnumpy().tolist() == [1, 2], "MXNet reads what is walked"


def test_no_changed_byte_of_a_parameter_file_takes_memory(params, monkeypatch):
    """Each byte of lengths, shapes and types: MXNet only reads as much as the file has."""
    content, sizes = params.read_bytes(), []
    monkeypatch.setattr(mx.nd, "load", lambda path: sizes.append(path) or {"one": mx.nd.zeros(1)})
    for place in range(len(content)):
        for value in (0, 1, 0x7F, 0xFF):
            changed = bytearray(content)
            changed[place] = value
            params.write_bytes(changed)
            try:
                files.read(params)
            except TrainError as error:
                assert str(error).startswith(f"{params} is not a complete MXNet parameter file: fetch or")
    assert sizes
    for cut in range(0, len(content), 7):
        params.write_bytes(content[:cut])
        with pytest.raises(TrainError):
            files.read(params)
    params.write_bytes(content[:52] + b"\x7f" + content[53:])
    with pytest.raises(TrainError):
        files.read(params)


def test_our_safetensors_have_a_checksum(tmp_path):
    pytest.importorskip("safetensors")
    path = tmp_path / "network.safetensors"
    tensors = {"b": np.float32([[1, 2], [3, 4]]), "a.num_batches_tracked": np.array(5, np.int64),
               "none": np.empty((0, 2), np.float32)}
    path.write_bytes(safetensors_file.content(tensors))
    found = safetensors_file.read(path)
    assert all(np.array_equal(found[name], array) and found[name].shape == array.shape
               for name, array in tensors.items())
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(TrainError, match=r"is not a complete safetensors file \(its tensors do not match its chec"):
        safetensors_file.read(path)
    from safetensors.numpy import save
    path.write_bytes(save(tensors))  # of another program
    assert safetensors_file.read(path).keys() == tensors.keys()


def test_a_pipe_in_place_of_a_graph(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(GraphError, match=r"cannot read the graph file .*pipe \(it is not a regular file\): give"):
        Graph.load(tmp_path / "pipe")
    with pytest.raises(GraphError, match="JSON that is nested too deeply for a graph"):
        Graph.from_json("[" * 100_000)

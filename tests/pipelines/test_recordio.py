"""RecordIO files: ours against MXNet's own reader and writer."""

import numpy as np
import pytest

from common.mxnet_compat import mx
from pipelines import DataError
from pipelines.recordio import MAGIC, BrokenRecordError, RecordFile, pack_record, read_index

MAGIC_BYTES = MAGIC.to_bytes(4, "little")


def random_payloads(rng: np.random.Generator) -> list[bytes]:
    """Payloads of odd lengths, some holding the magic number at all alignments."""
    payloads = [rng.bytes(int(n)) for n in rng.integers(0, 200, 20)]
    for shift in range(8):
        payloads.append(rng.bytes(shift) + MAGIC_BYTES + rng.bytes(5) + MAGIC_BYTES * 2 + rng.bytes(3))
    return [*payloads, MAGIC_BYTES, MAGIC_BYTES * 3]


@pytest.mark.parametrize("seed", range(3))
def test_mxnet_reads_what_we_write_and_we_what_mxnet_writes(tmp_path, seed):
    rng = np.random.default_rng(seed)
    payloads = random_payloads(rng)
    labels = [float(label) for label in rng.integers(0, 1000, len(payloads))]

    ours = tmp_path / "ours.rec"
    records = [pack_record(label, payload, i) for i, (label, payload) in enumerate(zip(labels, payloads, strict=True))]
    ours.write_bytes(b"".join(records))
    reader = mx.recordio.MXRecordIO(str(ours), "r")
    for i, (label, payload) in enumerate(zip(labels, payloads, strict=True)):
        header, image = mx.recordio.unpack(reader.read())
        assert (header.label, header.id, image) == (label, i, payload)
    assert reader.read() is None

    same = tmp_path / "same.rec"
    writer = mx.recordio.MXRecordIO(str(same), "w")
    for i, (label, payload) in enumerate(zip(labels, payloads, strict=True)):
        writer.write(mx.recordio.pack(mx.recordio.IRHeader(0, label, i, 0), payload))
    writer.close()
    assert same.read_bytes() == ours.read_bytes()

    theirs = tmp_path / "theirs.rec"
    writer = mx.recordio.MXIndexedRecordIO(str(theirs.with_suffix(".idx")), str(theirs), "w")
    for i, (label, payload) in enumerate(zip(labels, payloads, strict=True)):
        several = np.array([label, 7.0], np.float32) if i % 2 else label  # of several labels, `label` is the first
        writer.write_idx(i, mx.recordio.pack(mx.recordio.IRHeader(0, several, i, 0), payload))
    writer.close()
    keys, offsets = read_index(theirs.with_suffix(".idx"))
    assert keys.tolist() == list(range(len(payloads)))
    file = RecordFile(theirs)
    assert list(file.scan()) == offsets.tolist()
    for offset, label, payload in zip(offsets.tolist(), labels, payloads, strict=True):
        record = file.read(offset)
        assert (record.label, record.image.tobytes()) == (label, payload)


def test_scan_passes_over_damage(tmp_path):
    records = [pack_record(float(i), bytes([i]) * (5 + i), i) for i in range(5)]
    starts = np.cumsum([0, *map(len, records)]).tolist()
    data = bytearray(b"".join(records))
    data[starts[2]] ^= 0xFF
    path = tmp_path / "a.rec"
    path.write_bytes(bytes(data[:-4]))  # cut off the last record
    file = RecordFile(path)
    assert list(file.scan()) == [starts[0], starts[1], starts[3]]
    for offset in (starts[2], starts[4], starts[0] + 4, 10**9, -4):
        with pytest.raises(BrokenRecordError):
            file.read(offset)


@pytest.mark.parametrize("text", ["", "0 1 2", "a\tb\n", "0\t0\nx\t4\n", "\xff"])
def test_what_is_no_index_is_refused(tmp_path, text):
    path = tmp_path / "a.idx"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=r"a\.idx: not an index"):
        read_index(path)


@pytest.mark.parametrize("change", ["none", "without the first", "without the last", "without one", "doubled", "cut"])
def test_records_are_counted_with_and_without_a_look_at_each(tmp_path, monkeypatch, change):
    """No scan is needed if the index has all records, each in one part. A scan is needed if the index lacks some, or if
    a record has several parts."""
    parts = [pack_record(i, bytes(range(i + 1)) * 9, i) for i in range(5)]
    if change == "cut":
        parts[2] = pack_record(2, b"abcd" + MAGIC_BYTES + b"efgh", 2)
    path = tmp_path / "train.rec"
    path.write_bytes(b"".join(parts))
    offsets = np.cumsum([0, *map(len, parts[:-1])])
    known = {"without the first": offsets[1:], "without the last": offsets[:-1], "without one": np.delete(offsets, 2),
             "doubled": np.append(offsets, offsets[2])}.get(change, offsets)
    file = RecordFile(path)
    if change in ("none", "doubled"):
        monkeypatch.setattr(file, "scan", None)
    assert file.count(known) == 5

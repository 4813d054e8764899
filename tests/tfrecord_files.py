"""TFRecord files of tf.train.Example, written for tests."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pipelines.crc32c import masked_crc32c


def varint(value: int) -> bytes:
    out = b""
    while value >= 0x80:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def example(image: bytes, label: int | Sequence[int], keys: tuple[str, str] = ("image/encoded", "image/class/label"),
            packed: bool = True) -> bytes:
    """A tf.train.Example with one or several labels."""
    numbers = [varint(each & (1 << 64) - 1) for each in ([label] if isinstance(label, int) else label)]
    features = {
        keys[0]: field(1, field(1, image)),
        "image/class/text": field(1, field(1, b"a name") + field(1, b"another")),
        "image/object/bbox/xmin": field(2, field(1, struct.pack("<2f", 0.5, 1))),
        keys[1]: field(3, field(1, b"".join(numbers)) if packed else b"".join(varint(1 << 3) + n for n in numbers)),
    }
    return field(1, b"".join(field(1, field(1, key.encode()) + field(2, value)) for key, value in features.items()))


def write_tfrecord(path: Path, payloads: list[bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(summed(struct.pack("<Q", len(data))) + summed(data) for data in payloads))


def summed(data: bytes) -> bytes:
    """Bytes followed by their checksum."""
    return data + masked_crc32c(np.frombuffer(data, np.uint8)[None]).tobytes()

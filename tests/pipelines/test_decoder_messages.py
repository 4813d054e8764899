"""Damaged JPEGs that still decode are found, named and used; and no other line that C libraries write to stderr is
lost."""

import ctypes
import inspect
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from image_helpers import encode, write_records
from PIL import Image

from common.quiet import without_lines
from pipelines import DataError, ImageTransform, LoaderConfig, open_loader
from pipelines.decoder_messages import decoder_messages
from pipelines.sources import open_source
from pipelines.verify import verify_split, write_clean

MESSAGE = "the decoder says: Corrupt JPEG data: "


def jpeg(seed: int) -> bytes:
    return encode(Image.fromarray(np.random.default_rng(seed).integers(0, 256, (60, 80, 3), np.uint8)), quality=95)


def damaged(seed: int) -> bytes:
    """Overwrite 64 bytes in the middle of a JPEG with bytes that cannot form a marker."""
    content = bytearray(jpeg(seed))
    middle = len(content) // 2
    content[middle : middle + 64] = np.random.default_rng(seed).integers(0, 255, 64, np.uint8).tobytes()
    return bytes(content)


@pytest.fixture
def records(tmp_path):
    """24 images, three of them damaged."""
    path = tmp_path / "train.rec"
    write_records(path, [damaged(i) if i in (3, 10, 11) else jpeg(i) for i in range(24)], [float(i) for i in range(24)])
    return path


def config(path, **options):
    return LoaderConfig(**{"data": str(path), "batch_size": 4, "image_size": 16, "num_threads": 2, **options})


@pytest.mark.parametrize("split, cache", [("train", 0.0), ("val", 0.0), ("val", 1.0)])
def test_the_loader_names_them_and_uses_them(records, capfd, split, cache):
    whole = ImageTransform(crop_padding=1)  # the whole image, as a random crop may miss the damage
    with open_loader(config(records, split=split, cache_gib=cache, transform=whole)) as loader:
        assert sorted(int(label) for batch in loader for label in batch.label.asnumpy()) == list(range(24))
        found = dict(loader.damaged_images)
        assert not loader.bad_images
    assert list(found) == [f"{records} record {i}" for i in (3, 10, 11)]
    assert all(message.startswith(MESSAGE) for message in found.values())
    assert "JPEG" not in capfd.readouterr().err


def test_one_that_another_decoder_takes_is_bad_where_verify_says_so(records, tmp_path):
    """At an invalid marker libjpeg gives up, but DALI's next decoder draws something; training judges the image as
    verify does."""
    content = bytearray(jpeg(7))
    content[len(content) // 2 : len(content) // 2 + 2] = b"\xff\x36"
    path = tmp_path / "other/train.rec"
    write_records(path, [bytes(content) if i == 2 else jpeg(i) for i in range(8)], [0.0] * 8)
    (_, finding), = verify_split(str(path), "train").findings
    assert (finding.kind, finding.usable) == ("broken", False)
    with open_loader(config(path, split="val", on_bad_image="skip")) as loader:
        assert sum(batch.num_valid for batch in loader) == 7
        assert [name for name, _ in loader.bad_images] == [f"{path} record 2"] and not loader.damaged_images
    with open_loader(config(path, split="val")) as loader, pytest.raises(DataError, match="record 2: broken, "):
        list(loader)


@pytest.mark.parametrize("place, marker, is_bad, reason", [
    (-3000, b"\xff\xcc\x00\x04\x21\x00", True, "broken, "),  # 'Bogus DAC index 33'
    (-2, b"\xff\xe5\x40\x00", False, "the decoder says: Input file read error"),  # a segment beyond the file's end
])
def test_one_that_libjpeg_alone_gives_up_is_named(tmp_path, capfd, place, marker, is_bad, reason):
    """libjpeg's lines do not name an image, and must not appear on the terminal."""
    images, path = [jpeg(i) for i in range(8)], tmp_path / "train.rec"
    images[2] = images[2][:place] + marker + images[2][place:]
    write_records(path, images, [0.0] * 8)
    with open_loader(config(path, split="val", on_bad_image="skip")) as loader:
        assert sum(batch.num_valid for batch in loader) == 8 - is_bad
        ((name, found),) = loader.bad_images if is_bad else loader.damaged_images
    assert name == f"{path} record 2" and found.startswith(reason)
    err = capfd.readouterr().err  # in which late lines of another test's MXNet may be
    assert "JPEG" not in err and "ERROR" not in err


def test_verify_finds_them(records, capfd):
    report = verify_split(str(records), "train")
    assert [name for name, _ in report.findings] == [f"{records} record {i}" for i in (3, 10, 11)]
    assert {(finding.kind, finding.usable) for _, finding in report.findings} == {("damaged", True)}
    assert all(finding.detail.startswith(MESSAGE) for _, finding in report.findings)
    write_clean(report)
    assert len(open_source(records, "train")) == 24
    assert "JPEG" not in capfd.readouterr().err


def test_other_lines_are_passed_on(capfd):
    messages = decoder_messages()
    messages.take()
    libc = ctypes.CDLL(None)
    libc.perror(b"a library")
    libc.perror(b"Corrupt JPEG data")
    lines = messages.take()
    assert len(lines) == 1 and lines[0].startswith("Corrupt JPEG data: ")
    err = capfd.readouterr().err
    assert err.startswith("a library: ") and err.count("\n") == 1


def cerr(text: bytes) -> None:
    """Write to C++'s std::cerr."""
    library = ctypes.CDLL("libstdc++.so.6")
    stream = ctypes.byref(ctypes.c_char.in_dll(library, "_ZSt4cerr"))
    library._ZStlsISt11char_traitsIcEERSt13basic_ostreamIcT_ES5_PKc(stream, text)


def test_lines_of_nvimagecodec_are_dropped(capfd):
    """nvImageCodec writes a line in pieces, beside lines of others."""
    decoder_messages().take()
    for piece in (b"\x1b[0;31m[ERROR] ", b"\x1b[0m", b"[jpeg_parser] Invalid marker", b"\n", b"[ERROR] of ", b"all\n"):
        cerr(piece)
    cerr(b"\x1b[0;31m[ERROR] \x1b[0m[libjpeg_turbo_decoder] Could not decode - Premature end of JPEG data\n")
    assert decoder_messages().take() == []
    assert capfd.readouterr().err == "[ERROR] of all\n"


def test_a_broken_image_leaves_no_line_of_a_parser(tmp_path, capfd):
    content = jpeg(1)
    images = [content, content[:2] + b"\xff\xd8\x01\x02" + content[60:], content]
    path = tmp_path / "train.rec"
    write_records(path, images, [0.0] * 3)
    with open_loader(config(path, split="val", on_bad_image="skip")) as loader:
        assert sum(batch.num_valid for batch in loader) == 2 and len(loader.bad_images) == 1
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("death", ["os.abort()", "os.kill(os.getpid(), 9)", "os._exit(3)"])
def test_last_words_are_not_lost(death):
    """A process dies before its thread has passed on the lines: 2,000 lines, and one without an end, are not lost."""
    program = inspect.getsource(cerr) + textwrap.dedent(f"""
        import ctypes, os
        from pipelines.decoder_messages import decoder_messages
        messages = decoder_messages()
        messages._lock.acquire()
        for number in range(2000):
            cerr(b"line %d of many words\\n" % number)
        ctypes.CDLL(None).perror(b"C")
        cerr(b"and the last")
        {death}
    """)
    done = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2],
                          capture_output=True, text=True, timeout=60)
    lines = done.stderr.splitlines()
    assert done.returncode and [line for line in lines if line.startswith("line ")] == [
        f"line {number} of many words" for number in range(2000)]
    assert lines[-1] == "and the last" and lines[-2].startswith("C: ")


def test_lines_that_are_dropped_elsewhere(capfd):
    """`without_lines` drops matching lines within its block, and none before or after the block."""
    decoder_messages().take()
    cerr(b"before\n")
    with without_lines(re.compile(b"unwanted")):
        cerr(b"unwanted\n")
        cerr(b"inside\n")
    cerr(b"unwanted after\n")
    decoder_messages().take()
    assert capfd.readouterr().err == "before\ninside\nunwanted after\n"


def test_a_line_without_an_end_is_passed_on(capfd):
    """Such a line, for example of a progress bar, is passed on after a moment."""
    cerr(b"almost")
    seen, limit = "", time.monotonic() + 10
    while "almost" not in seen and time.monotonic() < limit:
        seen += capfd.readouterr().err
        time.sleep(0.02)
    assert seen == "almost"

"""The loader and its commands on real JPEGs; skipped if they are absent."""

import numpy as np
import pytest

from pipelines import LoaderConfig, open_loader
from pipelines.make_records import Options, plan_files, write_records
from pipelines.sources import open_source
from pipelines.verify import verify_split


@pytest.fixture(scope="module")
def imagenet(real_data):
    folder = real_data / "imagenet_sample"
    if not folder.is_dir():
        pytest.skip(f"no imagenet_sample in {real_data}")
    return folder


def test_imagenet_to_records_and_back(imagenet, tmp_path):
    plan = plan_files(imagenet, "train")
    assert len(plan.entries) == len(plan.classes) == 900
    some = plan._replace(entries=plan.entries[::9])
    write_records(some, tmp_path, "train", Options())
    report = verify_split(str(tmp_path), "train")
    assert (report.num_images, report.num_unusable) == (100, 0)
    source = open_source(tmp_path, "train")
    by_label = {source.label(i): source.read(i).tobytes() for i in range(100)}
    for entry in some.entries:
        assert by_label[entry.label] == entry.file.read_bytes()

    loader = open_loader(LoaderConfig(data=str(tmp_path), batch_size=20, image_size=96, dtype="float16", channels=4))
    pixels, labels = zip(*((b.data.asnumpy(), b.label.asnumpy()) for b in loader), strict=True)
    assert sorted(np.concatenate(labels).astype(int)) == sorted(by_label)
    values = np.concatenate(pixels)[..., :3].astype(np.float32)
    # Normalised with ImageNet's own mean and deviation, pictures of ImageNet come out near 0 and 1.
    assert np.abs(values.mean((0, 1, 2))).max() < 0.4
    assert np.abs(values.std((0, 1, 2)) - 1).max() < 0.3


def test_cifar10(real_data):
    if not (real_data / "cifar10").is_dir():
        pytest.skip(f"no cifar10 in {real_data}")
    counts = np.zeros(10, int)
    for rank in range(2):
        config = LoaderConfig(data=str(real_data / "cifar10"), split="val", batch_size=500, image_size=32)
        loader = open_loader(config, (rank, 2))
        assert loader.class_names[0] == "airplane" and loader.num_images == 10_000
        for batch in loader:
            labels = batch.label.asnumpy()[: batch.num_valid].astype(int)
            counts += np.bincount(labels, minlength=10)
    assert counts.tolist() == [1000] * 10

"""Synthetic images: shapes, sharding, and labels that can be learned from the pixels."""

import numpy as np
import pytest

from pipelines import LoaderConfig, open_loader


def load(**options):
    return open_loader(LoaderConfig(data="synthetic", **{"batch_size": 16, "image_size": 20, **options}))


def test_image_sizes_by_epoch():
    loader = load(image_size=9, image_sizes=(20, 8), synthetic_images=32)
    assert [{batch.data.shape for batch in loader} for _ in range(3)] == [{(16, s, s, 3)} for s in (20, 8, 9)]


@pytest.mark.parametrize("image_size", [1, 7, 33])
def test_shapes(image_size):
    loader = load(image_size=image_size, dtype="float16", channels=4, num_classes=3, synthetic_images=50)
    batches = list(loader)
    assert len(batches) == loader.num_batches == 3
    for batch in batches:
        assert batch.data.shape == (16, image_size, image_size, 4) and batch.data.dtype == np.float16
        assert not batch.data.asnumpy()[..., 3].any()
        assert set(batch.label.asnumpy().astype(int)) <= {0, 1, 2}
    assert loader.class_names == ["pattern 0", "pattern 1", "pattern 2"]


def test_validation_counts_every_image_once():
    total = 0
    for rank in range(3):
        config = LoaderConfig(data="synthetic", split="val", batch_size=7, image_size=8, synthetic_images=500)
        total += sum(batch.num_valid for batch in open_loader(config, (rank, 3)))
    assert total == 50


def test_labels_can_be_learned():
    """Class means of the training images classify the validation images; with permuted labels they do not."""
    batches = list(load(synthetic_images=640))
    pixels = np.concatenate([b.data.asnumpy().reshape(16, -1) for b in batches])
    labels = np.concatenate([b.label.asnumpy().astype(int) for b in batches])
    means = np.stack([pixels[labels == label].mean(0) for label in range(10)])
    other = list(load(split="val", synthetic_images=1600))
    val_pixels = np.concatenate([b.data.asnumpy().reshape(16, -1) for b in other])
    val_labels = np.concatenate([b.label.asnumpy().astype(int) for b in other])
    nearest = ((val_pixels[:, None] - means) ** 2).sum(-1).argmin(1)
    assert (nearest == val_labels).mean() > 0.95
    assert (nearest == np.roll(val_labels, 1)).mean() < 0.3


def test_resume():
    unbroken, broken = load(), load()
    batches = [b.data.asnumpy() for b in unbroken]
    for _, _ in zip(range(5), broken, strict=False):
        pass
    resumed = load()
    resumed.restore(broken.state())
    for got, wanted in zip(resumed, batches[5:], strict=True):
        np.testing.assert_array_equal(got.data.asnumpy(), wanted)

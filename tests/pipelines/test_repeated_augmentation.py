"""--repeated-augmentation: copies of an image in a batch, augmented differently; a function of (seed, epoch) alone."""

import numpy as np
import pytest
from image_helpers import encode, smooth_image, write_records

from pipelines import DataError, LoaderConfig, open_loader

NUM_IMAGES = 50


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A RecordIO file of images whose labels are their numbers."""
    path = tmp_path_factory.mktemp("repeated") / "train.rec"
    rng = np.random.default_rng(0)
    write_records(path, [encode(smooth_image(rng, 40, 40)) for _ in range(NUM_IMAGES)], list(map(float, range(50))))
    return path


def loader(path, rank=0, size=1, **options):
    values = {"batch_size": 12, "image_size": 16, "num_threads": 2, "repeated_augmentation": 3, **options}
    return open_loader(LoaderConfig(data=str(path), num_classes=NUM_IMAGES, **values), (rank, size))


def batches_of(opened):
    return [(batch.data.asnumpy(), batch.label.asnumpy().astype(int)) for batch in opened]


def ra_sampler(order, copies, rank, size):
    """RASampler of DeiT (facebookresearch/deit, samplers.py) and torchvision (references/classification/sampler.py),
    without their treatment of an epoch's end."""
    return [image for image in order for _ in range(copies)][rank::size]


def test_an_epoch_is_as_long_and_holds_copies_of_a_part(images):
    with loader(images) as repeated, loader(images, repeated_augmentation=0) as plain:
        assert repeated.num_batches == plain.num_batches == 4
        epochs = [np.concatenate([labels for _, labels in batches_of(repeated)]) for _ in range(2)]
        order = np.concatenate([labels for _, labels in batches_of(plain)])
    assert not set(epochs[0]) <= set(epochs[1]), "each epoch has others"
    for labels in epochs:
        assert np.array_equal(labels, np.repeat(labels[::3], 3)) and len(set(labels)) == 16
    assert epochs[0].tolist() == ra_sampler(order, 3, 0, 1)[:48]
    with loader(images, seed=1) as other:
        assert not set(np.concatenate([labels for _, labels in batches_of(other)])) <= set(epochs[0])


def test_each_copy_is_augmented_anew(images):
    with loader(images) as repeated:
        for pixels, labels in batches_of(repeated):
            for label in set(labels):
                assert len(np.unique(pixels[labels == label].reshape(3, -1), axis=0)) == 3


@pytest.mark.parametrize("size, copies", [(2, 3), (3, 3), (4, 3), (4, 2)])
def test_processes_share_each_batch(images, size, copies):
    """Copies go to different processes, as far as there are enough, and have the augmentation that they would have in
    one process."""
    with loader(images, repeated_augmentation=copies) as one:
        whole = batches_of(one)
    shares = []
    for rank in range(size):
        with loader(images, rank, size, batch_size=12 // size, repeated_augmentation=copies) as share:
            shares.append(batches_of(share))
    order = np.concatenate([labels for _, labels in whole])[::copies].tolist()
    for rank, share in enumerate(shares):
        labels = np.concatenate([labels for _, labels in share])
        assert labels.tolist() == ra_sampler(order, copies, rank, size)[: len(labels)]
        assert size < copies or all(len(set(of_batch)) == len(of_batch) for _, of_batch in share)
        for (pixels, _), (all_pixels, _) in zip(share, whole, strict=True):
            np.testing.assert_array_equal(pixels, all_pixels[rank::size])


def test_it_goes_on_with_equal_bits_on_more_processes_too(images):
    with loader(images) as whole, loader(images) as first, loader(images, 1, 2, batch_size=6) as rest:
        wanted = batches_of(whole) + batches_of(whole)
        iterator = iter(first)
        for _ in range(3):
            next(iterator)
        rest.restore(first.state())
        got = batches_of(rest) + batches_of(rest)
    assert len(got) == 5
    for (pixels, labels), (wanted_pixels, wanted_labels) in zip(got, wanted[3:], strict=True):
        np.testing.assert_array_equal(labels, wanted_labels[1::2])
        np.testing.assert_array_equal(pixels, wanted_pixels[1::2])


def test_with_balance_it_repeats_the_images_drawn(images, tmp_path):
    """One class has 60 images, the other 12; each gets 36 draws."""
    path = tmp_path / "train.rec"
    rng = np.random.default_rng(0)
    labels = [0.0] * 60 + [1.0] * 12
    write_records(path, [encode(smooth_image(rng, 40, 40)) for _ in labels], labels)
    counts = np.zeros(2)
    with open_loader(LoaderConfig(data=str(path), batch_size=24, image_size=16, num_threads=2, balance=1.0,
                                  repeated_augmentation=3)) as opened:
        for _ in range(20):
            for batch in opened:
                assert all(batch.indices[i] == batch.indices[i - i % 3] for i in range(24))
                counts += np.bincount(batch.label.asnumpy().astype(int), minlength=2)
    assert counts.sum() == 20 * 72
    assert counts[1] / counts.sum() == pytest.approx(0.5, abs=0.12)  # 480 draws: a standard deviation of 0.02


def test_a_broken_image_is_named_once_and_replaced(tmp_path):
    path = tmp_path / "train.rec"
    rng = np.random.default_rng(0)
    encoded = [encode(smooth_image(rng, 40, 40)) for _ in range(12)]
    encoded[5] = encoded[5][:200]
    write_records(path, encoded, list(map(float, range(12))))
    with loader(path, on_bad_image="skip", cache_gib=0.0) as opened:
        seen = [labels for _ in range(6) for _, labels in batches_of(opened)]  # 4 of 12 images an epoch
        assert [name for name, _ in opened.bad_images] == [f"{path} record 5"]
    assert len(seen) == 6 and not any(5 in labels for labels in seen)
    assert [len(set(labels)) for labels in seen] == [4, 4, 4, 4, 3, 3]


def test_validation_has_no_copies(images):
    for suffix in (".rec", ".idx"):
        (images.parent / f"val{suffix}").write_bytes(images.with_suffix(suffix).read_bytes())
    with loader(images.parent, split="val") as opened:
        assert sorted(i for batch in opened for i in batch.indices) == list(range(NUM_IMAGES))


@pytest.mark.parametrize("options, sentence", [
    ({"repeated_augmentation": 1}, "repeated_augmentation is 1; it must be 0, or at least 2"),
    ({"repeated_augmentation": 13}, "--repeated-augmentation 13 is more than the 12 images of a batch, but all "
                                    "copies of an image must fit into one batch; lower "
                                    "--repeated-augmentation"),
])
def test_mistakes(images, options, sentence):
    with pytest.raises(DataError) as error:
        loader(images, **options)
    assert str(error.value) == sentence


def test_synthetic_images_have_no_copies():
    """Synthetic images ignore repeated augmentation, like all other augmentations, so that a recipe's speed can be
    measured with all its options.
    """
    with loader("synthetic") as copied, loader("synthetic", repeated_augmentation=0) as plain:
        assert (next(iter(copied)).data.asnumpy() == next(iter(plain)).data.asnumpy()).all()


def test_a_position_of_other_copies_is_refused(images):
    with loader(images) as repeated, loader(images, repeated_augmentation=0) as plain:
        for one, other in ((repeated, plain), (plain, repeated)):
            with pytest.raises(DataError, match="belongs to repeated_augmentation .* and --repeated-augmentation, or"):
                other.restore(one.state())

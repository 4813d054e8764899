"""--balance: classes of unequal size are drawn more equally often, as a function of (seed, epoch) alone."""

import numpy as np
import pytest
from image_helpers import encode, smooth_image, write_records

from pipelines import DataError, LoaderConfig, open_loader
from pipelines.balance import draw_balanced
from pipelines.sources import records

SIZES = (60, 9, 2, 1)


@pytest.fixture(scope="module")
def long_tail(tmp_path_factory):
    """A RecordIO file of 72 images in classes of 60, 9, 2 and 1."""
    path = tmp_path_factory.mktemp("long_tail") / "train.rec"
    rng = np.random.default_rng(0)
    labels = [float(label) for label, size in enumerate(SIZES) for _ in range(size)]
    write_records(path, [encode(smooth_image(rng, 40, 40)) for _ in labels], labels)
    return path


def loader(path, rank=0, size=1, **options):
    values = {"batch_size": 8, "image_size": 16, "num_threads": 2, "balance": 1.0, **options}
    return open_loader(LoaderConfig(data=str(path), **values), (rank, size))


def batches_of(opened):
    return [(batch.data.asnumpy(), batch.label.asnumpy().astype(int)) for batch in opened]


def assert_equal(some, others):
    for (pixels, labels), (other_pixels, other_labels) in zip(some, others, strict=True):
        np.testing.assert_array_equal(labels, other_labels)
        np.testing.assert_array_equal(pixels, other_pixels)


@pytest.mark.parametrize("balance, counts", [
    (0.0, [60, 9, 2, 1]),
    (0.5, [43, 17, 8, 6]),  # 72 in proportion to the roots 7.75, 3, 1.41 and 1: 42.4, 16.4, 7.7 and 5.5
    (1.0, [18, 18, 18, 18]),
])
def test_how_often_classes_and_images_are_drawn(balance, counts):
    images = np.split(np.arange(72), np.cumsum(SIZES)[:-1])
    drawn = draw_balanced(images, balance, np.random.default_rng(0))
    assert len(drawn) == 72
    for of_class, count in zip(images, counts, strict=True):
        times = np.bincount(drawn, minlength=72)[of_class]
        assert abs(times.sum() - count) <= 1
        assert times.max() - times.min() <= 1  # the images of a class are drawn equally often


def test_what_rounding_leaves_goes_to_other_classes_in_each_epoch():
    images = np.split(np.arange(11), [5, 8])  # 11 / 3 draws for each class
    counts = [np.bincount(np.digitize(draw_balanced(images, 1.0, np.random.default_rng(epoch)), [5, 8])).tolist()
              for epoch in range(20)]
    assert {tuple(sorted(each)) for each in counts} == {(3, 4, 4)}
    assert len(set(map(tuple, counts))) == 3


def test_an_epoch_is_as_long_and_balanced(long_tail):
    with loader(long_tail) as balanced, loader(long_tail, balance=0.0) as plain:
        epochs = [np.concatenate([labels for _, labels in batches_of(balanced)]) for _ in range(2)]
        assert balanced.num_batches == plain.num_batches == 9
        assert "--balance 1: the classes have 1 to 60 images, and rare ones are drawn more often" in balanced.remarks
        assert not plain.remarks
        for labels in epochs:
            assert np.bincount(labels).tolist() == [18, 18, 18, 18]
        assert not np.array_equal(*epochs)


def test_how_many_images_each_class_has(long_tail):
    """The counts are in the order of the labels, which may differ from the data's own order."""
    with loader(long_tail, balance=0.0) as opened:
        assert opened.class_sizes().tolist() == [60, 9, 2, 1]
        opened.count_classes_as([(name, name) for name in "abcde"], [4, 1, 0, 2])
        assert opened.class_sizes().tolist() == [2, 9, 1, 0, 60]


def test_an_image_that_comes_again_is_augmented_anew(long_tail):
    with loader(long_tail, batch_size=72) as balanced:
        ((pixels, labels),) = batches_of(balanced)
    assert len(np.unique(pixels[labels == 3].reshape(18, -1), axis=0)) == 18  # one image


def test_it_goes_on_with_equal_bits(long_tail):
    with loader(long_tail) as whole, loader(long_tail) as first, loader(long_tail) as rest:
        wanted = batches_of(whole) + batches_of(whole)
        iterator = iter(first)
        for _ in range(4):
            next(iterator)
        rest.restore(first.state())
        assert_equal(batches_of(rest) + batches_of(rest), wanted[4:])


def test_processes_share_each_batch(long_tail):
    with loader(long_tail, batch_size=8) as one, loader(long_tail, 0, 2, batch_size=4) as left, \
            loader(long_tail, 1, 2, batch_size=4) as right:
        halves = [tuple(map(np.concatenate, zip(*both, strict=True)))
                  for both in zip(batches_of(left), batches_of(right), strict=True)]
        assert_equal(halves, batches_of(one))


def test_after_a_lost_process_the_rest_of_the_epoch_follows(long_tail):
    """The position counts images of one order, whatever the number of processes."""
    with loader(long_tail, 0, 2, batch_size=4) as before, loader(long_tail, batch_size=4) as after, \
            loader(long_tail, batch_size=8) as whole:
        next(iter(before))
        after.restore(before.state())
        rest, seen = (np.concatenate([labels for _, labels in batches_of(opened)]) for opened in (after, whole))
        np.testing.assert_array_equal(rest, seen[8:])


def test_broken_records_are_not_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "_NUM_SPOT_CHECKS", 2)  # by default all are checked
    path = tmp_path / "train.rec"
    rng = np.random.default_rng(0)
    write_records(path, [encode(smooth_image(rng, 40, 40)) for _ in range(16)], [float(i % 2) for i in range(16)])
    offset = int(path.with_suffix(".idx").read_text().split()[11])  # the offset of record 5
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"rubbish!")
    with loader(path, on_bad_image="skip", batch_size=4, num_classes=2) as opened:
        assert np.bincount(np.concatenate([labels for _, labels in batches_of(opened)])).tolist() == [8, 8]
        assert [name for name, _ in opened.bad_images] == [f"{path} record 5"]
    with pytest.raises(DataError, match="record 5: .*--on-bad-image skip"):
        loader(path, batch_size=4, num_classes=2)


def test_synthetic_images_are_refused():
    with pytest.raises(DataError, match="have a validation split and classes of equal size; leave out --balance"):
        loader("synthetic")

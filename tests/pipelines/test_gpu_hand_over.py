"""The hand-over of batches from DALI's memory to the training step's on a GPU: complete, in order, never
overwritten."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from image_helpers import encode, smooth_image, write_records

from graph_passes import Graph
from pipelines import LoaderConfig, open_loader
from train.models.network import init_params
from train.models.resnet import resnet

pytestmark = pytest.mark.gpu

BATCH, PIXELS, NUM_BATCHES = 16, 64, 40
DELAY_BYTES = 4 << 30  # filling them takes a GPU about a millisecond


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("RESNET_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def config(tmp_path, rng) -> LoaderConfig:
    """A loader of images that differ widely, each in its own class."""
    images = [encode(smooth_image(rng, 200, 150), quality=95) for _ in range(5 * BATCH)]
    write_records(tmp_path / "train.rec", images, [float(i) for i in range(len(images))])
    return LoaderConfig(data=str(tmp_path / "train.rec"), batch_size=BATCH, image_size=PIXELS, dtype="float16",
                        channels=4, device="gpu", decoder="gpu", hw_decoder_load=0.65)


def test_the_step_reads_what_the_loader_made(config):
    """The GPU is kept so busy that each batch is copied long after the loader has handed it over, dropped it and made
    others. The step's inputs are compared with the batches of a loader that waits each time."""
    from graph_passes.executors.cuda.executor import CudaExecutor

    symbol = resnet(18, 5 * BATCH)
    shapes = {"data": (BATCH, PIXELS, PIXELS, 3), "softmax_label": (BATCH,)}
    executor = CudaExecutor(Graph.from_json(symbol.tojson()), shapes, dtype="float16")
    executor.set_params(*init_params(symbol, seed=0))
    gpu, inputs = executor.gpu, executor.step.persistent
    scratch = gpu.allocate(DELAY_BYTES)
    kept = [(gpu.allocate(inputs.data.num_bytes), gpu.allocate(inputs.label.num_bytes)) for _ in range(NUM_BATCHES)]
    with open_loader(config) as loader:
        for (data, label), batch in zip(kept, endless(loader), strict=False):
            for _ in range(5):
                gpu.fill(scratch, 0, DELAY_BYTES)
            executor.forward_backward(batch.data, batch.label)
            gpu.copy(data, inputs.data.address, inputs.data.num_bytes)
            gpu.copy(label, inputs.label.address, inputs.label.num_bytes)
            del batch
        executor.synchronize()
    with open_loader(config) as loader:
        for (data, label), batch in zip(kept, endless(loader), strict=False):
            np.testing.assert_array_equal(gpu.download(label, (BATCH,), np.float32), batch.label.asnumpy())
            found = gpu.download(data, batch.data.shape, np.float16).astype(np.float32)
            # Equal images differ at most like two decoders of the GPU; different images differ by about 1.
            difference = np.abs(found - batch.data.asnumpy().astype(np.float32)).mean(axis=(1, 2, 3))
            assert difference.max() < 0.05
            assert np.abs(found - found[::-1]).mean() > 0.3
    for address in (scratch, *itertools.chain.from_iterable(kept)):
        gpu.free(address)


def endless(loader):
    return itertools.chain.from_iterable(itertools.repeat(loader))


def test_broken_images_are_skipped_on_the_gpu(tmp_path):
    rng = np.random.default_rng(5)
    images = [encode(smooth_image(rng, 120, 90), quality=95) for _ in range(60)]
    broken = {7: images[7][: len(images[7]) // 2], 21: b"", 22: b"no image at all" * 20, 40: images[40][:150],
              59: images[59][:-60]}
    for i, content in broken.items():
        images[i] = content
    write_records(tmp_path / "train.rec", images, [float(i) for i in range(60)])
    config = LoaderConfig(data=str(tmp_path / "train.rec"), batch_size=6, image_size=32, device="gpu", decoder="gpu",
                          on_bad_image="skip", hw_decoder_load=0.65)
    with open_loader(config) as loader:
        for _ in range(2):
            seen = {int(label) for batch in loader for label in batch.label.asnumpy()}
        assert [name.rsplit(" ", 1)[1] for name, _ in loader.bad_images] == [str(i) for i in sorted(broken)]
    assert seen == set(range(60)) - set(broken)

"""The library that hands buckets of gradients to Horovod, on memory of the host; on GPUs: test_multi_gpu.py."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from test_distributed import needs_horovod, run_processes

from graph_passes import GraphError
from train import allreduce
from train.allreduce import LIBRARY
from train.distributed import Workers
from train.errors import TrainError

BUCKETS = """
    import ctypes
    import sys
    from types import SimpleNamespace
    import numpy as np
    from graph_passes.executors.cuda.buckets import Bucket
    from train.allreduce import ON_HOST, BucketAverage, HorovodAllReduce
    from train.distributed import Workers

    workers = Workers()
    # What Horovod's library links must not be there for everybody: CUDA's old libraries on a GPU (horovod_mxnet.py).
    everybody = ctypes.CDLL(None)
    assert not hasattr(everybody, "horovod_size") and not hasattr(everybody, "MXGetVersion")
    values = dict(np.load(f"{sys.argv[1]}/rank{workers.rank}.npz"))
    buckets = [Bucket(name, array.ctypes.data, array.size, str(array.dtype), 0, 0)
               for name, array in sorted(values.items())]
    followed = []

    def hand_over(on_bucket):
        for bucket in buckets:
            on_bucket(bucket)

    executor = SimpleNamespace(buckets=buckets, follow=followed.append, hand_over=hand_over)
    average = BucketAverage(executor, HorovodAllReduce(ON_HOST))
    assert "first 0.0 MB float16" in average.description
    for bucket in buckets:
        average.start(bucket)
    average.finish()
    assert followed == buckets
    np.savez(f"{sys.argv[1]}/started{workers.rank}.npz", **values)
    for name, sent in np.load(f"{sys.argv[1]}/rank{workers.rank}.npz").items():
        values[name][:] = -2 * sent
    average.finish()  # starts them all itself
    assert followed == 2 * buckets
    np.savez(f"{sys.argv[1]}/finished{workers.rank}.npz", **values)
"""


def library_exists() -> bool:
    horovod = find_spec("horovod")
    return bool(horovod and horovod.origin and (Path(horovod.origin).parent / "mxnet" / LIBRARY).exists())


needs_library = pytest.mark.skipif(not library_exists(), reason="scripts/build_allreduce.sh has not been run")


@needs_horovod
@needs_library
def test_buckets_become_their_mean(tmp_path, rng):
    sent = []
    for rank in range(2):
        sent.append({
            "first": rng.standard_normal(1001).astype(np.float16),
            "second": rng.standard_normal(7).astype(np.float32),
        })  # fmt: skip
        np.savez(tmp_path / f"rank{rank}.npz", **sent[rank])
    done = run_processes(BUCKETS, tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        for name, tolerance in (("first", 2e-3), ("second", 1e-6)):  # two roundings of 2^-11 in float16
            mean = (sent[0][name].astype(np.float64) + sent[1][name]) / 2
            for how, expected in (("started", mean), ("finished", -2 * mean)):
                got = np.load(tmp_path / f"{how}{rank}.npz")[name]
                np.testing.assert_allclose(got, expected, rtol=tolerance, atol=2 * tolerance, err_msg=f"{how} {name}")


@needs_horovod
def test_horovod_without_nccl_or_library_is_one_sentence(monkeypatch):
    from train.horovod_mxnet import hvd

    monkeypatch.setattr(hvd, "nccl_built", lambda: 0)
    with pytest.raises(TrainError, match="this Horovod was built without NCCL"):
        allreduce.load_library(on_gpu=True)
    monkeypatch.setattr(allreduce, "LIBRARY", "there_is_no_such.so")
    with pytest.raises(TrainError, match=r"there_is_no_such\.so, which cannot be loaded .*run make setup"):
        allreduce.load_library(on_gpu=False)


class Exchange:
    """Of a process whose GPU the others may not reach."""

    description = "by the GPUs"
    invitations = ("handle",)

    def __init__(self, fault: str) -> None:
        self.fault, self.joined = fault, None

    def join(self, invitations, own):
        if self.fault:
            raise GraphError(self.fault)
        self.joined = invitations, own

    def give_up(self): ...


@pytest.mark.parametrize("asked, fault, elastic, local_size, way", [
    ("auto", "", "", 4, "peer"),
    ("peer", "", "", 4, "peer"),
    ("nccl", "", "", 4, "by Horovod"),
    ("auto", "GPU a cannot write (CUDA error 1: d): use c", "", 4, "by Horovod (GPU a cannot write (CUDA error 1: d))"),
    ("peer", "GPU a cannot write into b: use c", "", 4, TrainError("GPU a cannot write into b: use c")),
    ("auto", "", "1", 4, "by Horovod (--all-reduce peer is not for elastic runs, whose GPUs come and go)"),
    ("peer", "", "1", 4, TrainError("--all-reduce peer is not for elastic runs, whose GPUs come and go: use nccl")),
    ("auto", "", "", 2, "by Horovod (--all-reduce peer is for the GPUs of one machine, which has 2 of 4 processes)"),
    ("peer", "", "", 2, TrainError("--all-reduce peer is for the GPUs of one machine, which has 2 of 4 processes: use "
                                   "nccl")),
])  # fmt: skip
def test_how_gradients_are_averaged(monkeypatch, asked, fault, elastic, local_size, way):
    """Within a machine by the GPUs, if they can; otherwise by Horovod, and the log says why."""
    monkeypatch.setattr(allreduce, "load_library", lambda on_gpu: None)
    monkeypatch.delenv("HOROVOD_SIZE", raising=False)
    monkeypatch.setenv("HOROVOD_ELASTIC", elastic)
    workers = Workers()
    workers.size, workers.local_size, workers.rank = 4, local_size, 3
    monkeypatch.setattr(workers, "_hvd", SimpleNamespace(allgather_object=lambda value, name: [value] * 4))
    exchange = Exchange(fault)
    executor = SimpleNamespace(buckets=[], gradient_exchange=lambda size: exchange)
    if isinstance(way, TrainError):
        with pytest.raises(TrainError) as error:
            workers.bucket_average(executor, asked)
        assert str(error.value) == str(way)
        return
    description = workers.bucket_average(executor, asked).description
    assert description == (f"gradients averaged beside the backward pass {'by the GPUs' if way == 'peer' else way}, "
                           "in buckets: ")
    assert exchange.joined == ((([("handle",)] * 4), 3) if way == "peer" else None)


@needs_horovod
@needs_library
def test_a_process_that_is_gone_is_an_error_not_a_hang(tmp_path):
    script = """
        import os, sys
        import numpy as np
        from types import SimpleNamespace
        from graph_passes.executors.cuda.buckets import Bucket
        from train.allreduce import ON_HOST, BucketAverage, HorovodAllReduce
        from train.distributed import Workers

        workers = Workers()
        if workers.rank == 1:
            os._exit(0)  # without a word: not even the launcher takes it for a failure
        values = np.ones(10, np.float32)
        bucket = Bucket("only", values.ctypes.data, 10, "float32", 0, 0)
        average = BucketAverage(SimpleNamespace(buckets=[bucket]), HorovodAllReduce(ON_HOST))
        average.start(bucket)
        try:
            average.finish()
        except RuntimeError as error:
            print(error, flush=True)
            os._exit(0)
    """
    done = run_processes(script)
    assert done.returncode == 0, done.stderr
    assert "the all-reduce of gradients (only) failed: " in done.stdout

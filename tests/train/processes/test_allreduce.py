"""The library that hands buckets of gradients to Horovod, with host memory; test_multi_gpu.py tests it on GPUs."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from several_processes import needs_horovod, run_processes

from train.errors import TrainError
from train.processes import allreduce
from train.processes.allreduce import LIBRARY

BUCKETS = """
    import ctypes
    import sys
    from types import SimpleNamespace
    import numpy as np
    from graph_passes.executors.cuda.buckets import Bucket
    from train.processes.allreduce import ON_HOST, BucketAllReduce
    from train.processes.distributed import Workers

    workers = Workers()
    # What Horovod's library links must not be there for everybody: CUDA's old libraries on a GPU (horovod_mxnet.py).
    everybody = ctypes.CDLL(None)
    assert not hasattr(everybody, "horovod_size") and not hasattr(everybody, "MXGetVersion")
    values = dict(np.load(f"{sys.argv[1]}/rank{workers.rank}.npz"))
    buckets = [Bucket(name, array.ctypes.data, array.size, str(array.dtype), 0, done=0)
               for name, array in sorted(values.items())]
    followed = []

    def hand_over(on_bucket):
        for bucket in buckets:
            on_bucket(bucket)

    passes = []
    executor = SimpleNamespace(step=SimpleNamespace(buckets=buckets), gpu=SimpleNamespace(wait_for=followed.append),
                               hand_over=hand_over, show_passes=passes.append, passes_shown=np.zeros(1, np.uint32))
    all_reduce = BucketAllReduce(executor, ON_HOST)
    assert all_reduce.description == ("gradients averaged by Horovod beside the backward pass, in buckets: "
                                   "first 0.0 MB float16, second 0.0 MB float32")
    for bucket in buckets:
        all_reduce.start(bucket)
    all_reduce.finish()
    assert followed == [0, 0]
    np.savez(f"{sys.argv[1]}/started{workers.rank}.npz", **values)
    for name, sent in np.load(f"{sys.argv[1]}/rank{workers.rank}.npz").items():
        values[name][:] = -2 * sent
    all_reduce.finish()  # starts them all itself
    assert followed == 2 * [0, 0]
    assert passes == [0, 1, 2]
    np.savez(f"{sys.argv[1]}/finished{workers.rank}.npz", **values)
"""


def library_exists() -> bool:
    horovod = find_spec("horovod")
    return bool(horovod and horovod.origin and (Path(horovod.origin).parent / "mxnet" / LIBRARY).exists())


needs_library = pytest.mark.skipif(not library_exists(), reason="scripts/build_horovod.py has not been run")


@needs_horovod
@needs_library
def test_buckets_become_their_mean(tmp_path, rng):
    sent = []
    for rank in range(2):
        sent.append({
            "first": rng.standard_normal(1001).astype(np.float16),
            "second": rng.standard_normal(7).astype(np.float32),
        })
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
    from train.processes.horovod_mxnet import hvd

    allreduce.load_library.cache_clear()  # which another test may have filled
    monkeypatch.setattr(hvd, "nccl_built", lambda: 0)
    with pytest.raises(TrainError, match="this Horovod was built without NCCL"):
        allreduce.load_library(on_gpu=True)
    monkeypatch.setattr(allreduce, "LIBRARY", "there_is_no_such.so")
    with pytest.raises(TrainError, match=r"there_is_no_such\.so, which cannot be loaded .*run make setup"):
        allreduce.load_library(on_gpu=False)


@pytest.mark.long
@needs_horovod
@needs_library
def test_a_process_that_is_gone_is_an_error_not_a_hang(tmp_path):
    script = """
        import os, sys
        import numpy as np
        from types import SimpleNamespace
        from graph_passes.executors.cuda.buckets import Bucket
        from train.processes.allreduce import ON_HOST, BucketAllReduce
        from train.processes.distributed import Workers

        workers = Workers()
        if workers.rank == 1:
            os._exit(0)  # without a word: not even the launcher takes it for a failure
        values = np.ones(10, np.float32)
        bucket = Bucket("only", values.ctypes.data, 10, "float32", 0, 0)
        executor = SimpleNamespace(show_passes=lambda number: None, passes_shown=np.zeros(1, np.uint32))
        all_reduce = BucketAllReduce(executor, ON_HOST)
        all_reduce.start(bucket)
        try:
            all_reduce.finish()
        except RuntimeError as error:
            print(error, flush=True)
            os._exit(0)
    """
    done = run_processes(script)
    assert done.returncode == 0, done.stderr
    assert "the all-reduce of gradients (only) failed: " in done.stdout

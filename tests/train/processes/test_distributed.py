"""Two processes over Gloo: averaged gradients, statistics, votes, and a mistake on one rank that ends both."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from several_processes import REPOSITORY, needs_horovod, run_processes

from train import checkpoint, models
from train.models.network import init_params
from train.processes.distributed import Workers
from train.recording.metrics import METRICS_FILE, RunRecord

# Five tests with one start of the processes. The error comes last, because the processes end after it.
SESSION = """
    import sys, time
    import numpy as np
    from common.mxnet_compat import mx
    from graph_passes import Graph, passes
    from graph_passes.executors import create_executor
    from graph_passes.optimizers.sgd import SGD
    from pipelines.synthetic import SyntheticLoader
    from train import __main__ as program
    from train.processes.distributed import Workers
    from train.errors import TrainError
    from train.models import network, resnet

    folder, *benchmark = sys.argv[1:]
    workers = Workers()
    symbol = resnet.resnet(18, num_classes=5)
    shapes = {"data": (16, 32, 32, 3), "softmax_label": (16,)}
    executor = create_executor("mxnet", Graph.from_json(symbol.tojson()), shapes)
    executor.set_params(*network.init_params(symbol, seed=1 + workers.rank))  # the broadcast must make them equal
    params, aux = executor.get_params()
    params = workers.broadcast(params, "params")
    executor.set_params(params, aux)

    batch = np.load(f"{folder}/batch{workers.rank}.npz")
    executor.forward_backward(mx.nd.array(batch["data"]), mx.nd.array(batch["label"]))
    local = {name: grad.asnumpy() for name, grad in executor.grads.items()}
    workers.gradient_all_reduce(executor).finish()
    workers.all_reduce_on_host(list(executor.aux.values()), "aux")
    np.savez(f"{folder}/rank{workers.rank}.npz",
             **{f"local/{name}": grad for name, grad in local.items()},
             **{f"averaged/{name}": grad.asnumpy() for name, grad in executor.grads.items()},
             **{f"params/{name}": param.asnumpy() for name, param in executor.params.items()},
             **{f"aux/{name}": value.asnumpy() for name, value in executor.aux.items()})

    optimizer = executor.create_optimizer(SGD(momentum=0), clip_norm=0.25)
    optimizer.step(1.0)
    np.savez(f"{folder}/clipped{workers.rank}.npz", norm=optimizer.gradient_norm,
             **{name: param.asnumpy() for name, param in executor.params.items()})

    # Two stages frozen, two slower: a step by the mean of the gradients of the others, which is all that is exchanged.
    graph = passes.slow_backbone(passes.freeze(Graph.from_json(symbol.tojson()), "stage2"), 0.25)
    frozen = create_executor("mxnet", graph, shapes)
    frozen.set_params(params, aux)
    optimizer = frozen.create_optimizer(SGD(momentum=0))
    frozen.forward_backward(mx.nd.array(batch["data"]), mx.nd.array(batch["label"]))
    workers.gradient_all_reduce(frozen).finish()
    optimizer.step(0.5)
    np.savez(f"{folder}/frozen{workers.rank}.npz",
             **{f"mean/{name}": frozen.to_canonical(name, grad) for name, grad in frozen.grads.items()},
             **{f"before/{name}": param for name, param in params.items()},
             **{f"after/{name}": param for name, param in frozen.get_params()[0].items()})

    # the vote is that of the call before, the same on both ranks
    votes = [workers.vote([workers.rank == 1, False]), workers.vote([False, False]), workers.vote([False, True])]
    assert votes == [[False, False], [True, False], [False, False]], votes
    # a request that is repeated until it is answered has one answer; a later one has its own
    votes = [workers.vote([workers.rank == 1, False]) for _ in range(2)]
    votes += [workers.vote([False, False]), workers.vote([True, False]), workers.vote([False, False])]
    assert votes == [[False, True], [True, False], [False, False], [False, False], [True, False]], votes
    assert workers.sum([workers.rank + 1, 0.5]) == [3.0, 1.0]
    assert workers.gather(f"rank {workers.rank}") == ["rank 0", "rank 1"]
    mx.nd.waitall()

    load = SyntheticLoader._load

    def late(self):
        time.sleep(0.3 * self.shard[0])
        return load(self)

    SyntheticLoader._load = late
    code = program.main(benchmark)
    assert code == 0, code

    def command(values):
        workers = Workers()
        with workers.agreement():
            if workers.rank == 1:
                raise TrainError("disk 7 of rank 1 is on fire; put it out")
        workers.sum([1.0])  # rank 0 would wait here forever

    program.COMMANDS["train"] = program.COMMANDS["train"]._replace(function="__main__:command")
    print("only the mistake is left", file=sys.stderr, flush=True)
    workers.sum([0.0])  # both have said so
    sys.exit(program.main(["train"]))
"""


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory, seed: int) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The results of SESSION, its folder and its exit code."""
    folder, rng = tmp_path_factory.mktemp("session"), np.random.default_rng(seed)
    for rank in range(2):
        np.savez(
            folder / f"batch{rank}.npz",
            data=rng.standard_normal((16, 32, 32, 3), np.float32),
            label=rng.integers(0, 5, 16).astype(np.float32),
        )
    done = run_processes(
        SESSION, folder, "benchmark", "--output", folder / "run", "--data", "synthetic", "--model", "resnet18",
        "--image-size", 32, "--batch-size", 2, "--device", "cpu", "--no-tensorboard", "--warmup-steps", 0,
        "--min-steps", 5, "--limit-steps", 5, "--log-every", 2, light=True,
    )
    assert "only the mistake is left" in done.stderr, done.stderr
    return folder, done


@needs_horovod
def test_averaged_gradients(session):
    """Batch 16 on each of two processes: both get the mean of the two local gradients, to 1e-6 (relative)."""
    folder, _ = session
    first, second = (np.load(folder / f"rank{rank}.npz") for rank in range(2))
    names = [name.partition("/")[2] for name in first.files if name.startswith("local/")]
    assert len(names) == 62  # 20 convolutions, 20 BatchNorms, the classifier's weight and bias
    for name in names:
        assert np.array_equal(first[f"params/{name}"], second[f"params/{name}"]), name
        expected = (first[f"local/{name}"].astype(np.float64) + second[f"local/{name}"]) / 2
        for averaged in (first[f"averaged/{name}"], second[f"averaged/{name}"]):
            np.testing.assert_allclose(averaged, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max(), err_msg=name)
    assert any(not np.array_equal(first[f"local/{name}"], second[f"local/{name}"]) for name in names)
    statistics = [name for name in first.files if name.startswith("aux/")]
    assert len(statistics) == 40
    assert all(np.array_equal(first[name], second[name]) for name in statistics)


@needs_horovod
def test_clipping_takes_the_mean_over_the_processes(session):
    folder, _ = session
    session_arrays = np.load(folder / "rank0.npz")
    clipped = [np.load(folder / f"clipped{rank}.npz") for rank in range(2)]
    mean = {name: session_arrays[f"averaged/{name}"].astype(np.float64) for name in clipped[0].files if name != "norm"}
    norm = np.sqrt(sum((grad**2).sum() for grad in mean.values()))
    assert norm > 0.5 and clipped[0]["norm"] == pytest.approx(norm, rel=1e-5)
    assert clipped[0]["norm"] == clipped[1]["norm"]
    for name, grad in mean.items():
        assert np.array_equal(clipped[0][name], clipped[1][name]), name
        before = session_arrays[f"params/{name}"]
        np.testing.assert_allclose(before - clipped[0][name], 0.25 * grad / norm, rtol=1e-4,
                                   atol=3e-7 * max(1e-3, np.abs(before).max()), err_msg=name)


@needs_horovod
def test_step_with_frozen_and_slower_layers(session):
    """On both processes frozen layers stay, and the others move by mean gradient and factor."""
    first, second = (np.load(session[0] / f"frozen{rank}.npz") for rank in range(2))
    assert all(np.array_equal(first[name], second[name]) for name in first.files)
    trained = {name.removeprefix("mean/") for name in first.files if name.startswith("mean/")}
    assert "stage3_block1_conv1_weight" in trained and "stage2_block1_conv1_weight" not in trained
    for name in (name.removeprefix("before/") for name in first.files if name.startswith("before/")):
        before, after = first[f"before/{name}"], first[f"after/{name}"]
        rate = 0.5 if name.startswith("classifier") else 0.125
        expected = before - rate * first[f"mean/{name}"].astype(np.float64) if name in trained else before
        tolerance = 1e-6 * max(1, np.abs(expected).max())  # a few roundings of 6e-8
        np.testing.assert_allclose(after, expected, rtol=0, atol=tolerance if name in trained else 0, err_msg=name)


@pytest.mark.long
@needs_horovod
def test_frozen_backbone_trains_as_in_one_process(narrow_network, tiny_options, initial_weights, tmp_path, run_train):
    """Batches of 4 on each of two processes, of 8 on one: if no BatchNorm uses its batch's statistics, both train the
    classifier equally, image by image."""
    script = "import sys; from train import __main__ as program; sys.exit(program.main(sys.argv[1:]))"
    options = [*tiny_options, "--freeze", "backbone", "--weights", initial_weights, "--validate-every", "0", "--output"]
    done = run_processes(script, *options, tmp_path / "two", light=True)
    assert done.returncode == 0, done.stderr
    code, _, err = run_train(*options, tmp_path / "one", "--batch-size", "8")
    assert code == 0, err
    one, two = (checkpoint.load(checkpoint.find(str(tmp_path / name))) for name in ("one", "two"))
    start, aux = init_params(models.create("resnet18", 3).symbol, one.config.seed, zero_init_residual=False)
    assert one.progress.step == two.progress.step == 6
    assert one.state["momentum"].keys() == two.state["momentum"].keys() == {"classifier_weight", "classifier_bias"}
    for name, value in one.params.items():
        way = np.abs(value - start[name]).max()
        assert way > 1e-3 if name.startswith("classifier") else way == 0, name
        # Sums of 8 terms in another order, 1e-6 of a gradient: a hundredth of this is allowed in each step.
        np.testing.assert_allclose(two.params[name], value, rtol=0, atol=1e-4 * way, err_msg=name)
    assert all(np.array_equal(two.aux[name], value) for name, value in aux.items())


@needs_horovod
def test_mistake_on_one_rank_ends_all_with_one_sentence(session):
    _, done = session
    assert done.returncode == 2
    told = done.stderr.rpartition("only the mistake is left\n")[2]
    lines = [line for line in told.splitlines() if line]  # both processes may write their line at once
    assert lines == ["error: disk 7 of rank 1 is on fire; put it out"]


@needs_horovod
def test_wait_for_a_loader_is_that_of_the_process_that_waits_longest(session):
    """Rank 0 records the run, and the loader of rank 1 takes 0.3 s for each batch."""
    folder, _ = session
    record = RunRecord.read_jsonl(folder / "run" / METRICS_FILE)
    assert len(record.step_ms) == 5
    assert sum(record.loader_wait_ms) > 500  # of 1,500: rank 0 may see a step end late
    assert np.add(record.loader_wait_ms, record.compute_ms) == pytest.approx(record.step_ms, abs=1e-3)


@pytest.mark.long
@needs_horovod
def test_process_that_dies_ends_the_others():
    script = """
        import os, sys, time
        if os.environ["HOROVOD_RANK"] == "1":
            sys.exit(7)
        time.sleep(10_000)
    """
    assert run_processes(script).returncode == 7


@pytest.mark.long
@needs_horovod
def test_who_was_killed_is_named_and_not_who_crashed_because_of_it():
    """The launcher sees both ends at once, and sees first the crashed process, which leaves half a line: it still names
    the killed one."""
    script = """
        import os, signal, sys
        from pathlib import Path
        from train.processes.distributed import Workers

        pids = Workers().gather(os.getpid())
        if pids[1] == os.getpid():
            os.kill(os.getpid(), signal.SIGKILL)
        while Path(f"/proc/{pids[1]}/stat").exists() and ") Z" not in Path(f"/proc/{pids[1]}/stat").read_text():
            pass
        print("half a line", end="", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGABRT)
    """
    done = run_processes(script)
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: process 1 (") and "was killed by SIGKILL" in last


def test_single_process_does_not_import_horovod():
    script = """if True:
        import sys
        from train.processes.distributed import Workers
        Workers()
        assert "horovod" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", script], check=True)


def test_without_horovod(monkeypatch):
    for name, value in (("RANK", "0"), ("SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_SIZE", "2"),
                        ("GLOO_RENDEZVOUS_ADDR", "127.0.0.1")):
        monkeypatch.setenv(f"HOROVOD_{name}", value)
    monkeypatch.delitem(sys.modules, "train.processes.horovod_mxnet", raising=False)
    monkeypatch.setitem(sys.modules, "horovod.mxnet", None)  # makes the import fail
    with pytest.raises(Exception, match=r"2 processes need Horovod, which is not installed here .*: run make setup"):
        Workers()


def test_one_process_is_its_own_mean():
    workers = Workers()
    assert workers.sum([1.5, 2.0]) == [1.5, 2.0]
    assert workers.vote([True, False]) == [True, False]
    assert workers.gather("x") == ["x"]


@pytest.mark.long
@needs_horovod
def test_nobody_gets_the_values_of_an_operation_that_failed():
    """Every waiting caller gets the error, until it is cleared; then Horovod continues."""
    script = """
        from common.mxnet_compat import mx
        from train.processes.distributed import Workers, drain_engine, is_lost_process

        workers = Workers()
        workers.all_reduce([mx.nd.zeros((1 + workers.rank,))], "of different sizes")
        other = mx.nd.ones((1,))
        for wait in 2 * (mx.nd.waitall, other.wait_to_read, other.asnumpy):
            try:
                wait()
            except Exception as error:
                assert is_lost_process(error) and "Mismatched" in str(error), error
            else:
                raise AssertionError(wait)
        drain_engine()
        print(f"{workers.sum([1.0])}\\n", end="", flush=True)
    """
    done = run_processes(script)
    assert (done.returncode, done.stdout) == (0, 2 * "[2.0]\n"), done.stderr


@pytest.mark.long
@needs_horovod
@pytest.mark.parametrize("elastic, error", [("0", "LostProcessError"), ("1", "HorovodInternalError")])
def test_processes_that_cannot_connect(elastic, error):
    """The other process never comes: an error is reported, and SIGABRT does not end this process."""
    script = """if True:
        import os
        from horovod.runner.common.util.hosts import SlotInfo
        from horovod.runner.gloo_run import create_slot_env_vars
        from horovod.runner.http.http_server import RendezvousServer
        from train.processes.distributed import Workers
        from train.processes.worker import on_this_machine

        places = [SlotInfo(f"slot{rank}", rank, 0, rank, 2, 1, 2) for rank in range(2)]
        server = RendezvousServer()
        os.environ.update(**on_this_machine(0), **create_slot_env_vars(places[0]))
        os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(server.start())
        server.init(places)
        try:
            Workers()
        except Exception as error:
            print(type(error).__name__, error)
        os._exit(0)  # the server has a thread
    """
    done = subprocess.run([sys.executable, "-u", "-c", script], capture_output=True, text=True, cwd=REPOSITORY,
                          env={**os.environ, "HOROVOD_GLOO_TIMEOUT_SECONDS": "1", "HOROVOD_ELASTIC": elastic})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{error} the processes could not connect to each other"), done.stderr

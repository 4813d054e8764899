"""BatchNorm statistics shared by a group of GPUs: the arithmetic, the places of the exchanges in a step, and the
exchange itself between streams of one GPU. tests/train/processes/test_multi_gpu.py tests it between GPUs."""

from __future__ import annotations

import ctypes
import re
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_without_gpu import check_memory, lower, lower_graph

from common.disk_cache import Cache
from common.mxnet_compat import mx
from graph_passes import Graph, GraphError
from graph_passes.executors.cuda import statistics_group
from graph_passes.executors.cuda.device import Gpu
from graph_passes.executors.cuda.kernel_library import SOURCES, KernelLibrary
from graph_passes.executors.cuda.statistics_group import MAX_VALUES, THREADS, StatisticsGroup
from graph_passes.operators.base import channel_sums, sums_about_mean
from graph_passes.operators.batch_norm import batch_statistics, data_gradient, gradient_sums, to_saved

EPS = 1e-5


@pytest.mark.parametrize("members, rows, channels", [(2, 35, 3), (3, 8, 7), (8, 2, 1)])
def test_what_members_share_gives_what_one_gpu_has_for_all_images(members: int, rows: int, channels: int,
                                                                  rng: np.random.Generator) -> None:
    """The formulas of batch_norm.cuh and batch_norm_group.cu, with the group's statistics and means of sums, against
    the reference operators on the images of all members. The common loss is the mean of the members' losses."""
    random = rng
    symbol = mx.sym.BatchNorm(mx.sym.Variable("x"), axis=3, eps=EPS, fix_gamma=False, name="bn")
    node = Graph.from_json(symbol.tojson())["bn"]
    x = random.normal(random.normal(0, 2, (members, 1, 1, 1, channels)), 1.5, (members, rows, 1, 1, channels))
    dy = random.normal(0.3, 1, x.shape)  # gradient of each member's own loss
    gamma = random.uniform(0.5, 1.5, channels)
    whole = x.reshape(-1, 1, 1, channels)
    statistics = batch_statistics(node, whole)
    saved, dz = to_saved(node, statistics), dy.reshape(whole.shape) / members
    dgamma, dbeta = gradient_sums(node, dz, whole, saved)
    dx = data_gradient(node, dz, whole, gamma, saved, (dgamma, dbeta))

    x, dy = x.reshape(members, rows, channels), dy.reshape(members, rows, channels)
    mean = x.mean(1).mean(0)
    var = (x.var(1) + (x.mean(1) - mean) ** 2).mean(0)
    invstd = 1 / np.sqrt(var + EPS)
    shared_dbeta, shared_dgamma = dy.sum(1).mean(0), (dy * (x - mean) * invstd).sum(1).mean(0)
    shared_dx = gamma * invstd * (dy - shared_dbeta / rows - (x - mean) * invstd * shared_dgamma / rows)

    for shared, wanted in ((mean, statistics.mean), (var, statistics.var), (shared_dgamma, dgamma),
                           (shared_dbeta, dbeta), (shared_dx.ravel() / members, dx.ravel())):
        np.testing.assert_allclose(shared, wanted, rtol=1e-9, atol=1e-12)  # float64


FAKE_GROUP = SimpleNamespace(arguments=lambda num_values: ())


@pytest.mark.parametrize("depth, batch_norms, projections, fused", [(18, 20, 3, False), (50, 53, 4, False),
                                                                     (50, 53, 4, True)])
def test_no_sum_is_read_before_it_is_shared(depth: int, batch_norms: int, projections: int, fused: bool) -> None:
    lowering, store = lower(depth, 4, 64, True, fused, group=FAKE_GROUP)
    launches = lowering.program.launches
    forward = [launch for launch in launches if launch.operation == "group_statistics"]
    assert len(forward) == batch_norms
    for exchange in forward:
        (own,), (of_group,) = exchange.reads, exchange.writes
        assert [launch for launch in launches if own in launch.reads] == [exchange]
        (apply,) = (launch for launch in launches if of_group in launch.reads)
        assert apply.operation in ("batch_norm_apply", "batch_norm_pair_apply", "batch_norm_relu_max_pool")
    exchanges = [launch for launch in launches if launch.operation == "group_mean"]
    assert len(exchanges) == batch_norms - projections, "both BatchNorms of a pair exchange at once on the way back"
    shared = [buffer for launch in exchanges for buffer in launch.writes]
    gradients = {store.gradients[name] for name in store.gradients if name.endswith(("_gamma", "_beta"))}
    assert len(shared) == len(gradients) == 2 * batch_norms and gradients == set(shared)
    fresh = set()  # written since they were shared
    for launch in launches:
        if launch.operation != "group_mean":
            assert not fresh & set(launch.reads), launch.node
            fresh |= set(launch.writes) & set(shared)
        else:
            assert set(launch.writes) <= fresh, launch.node
            fresh -= set(launch.writes)
    assert not fresh
    operations = {launch.operation for launch in launches}
    assert fused == ("dgrad_reduce" in operations) == ("norm_backward" in operations)
    check_memory(lowering.program)
    # A gradient is handed over only after the exchange.
    for name, number in lowering.ready.items():
        if store.gradients[name] in gradients:
            assert launches[number - 1] in exchanges, name


@pytest.mark.long
def test_members_exchange_in_one_order_whatever_they_have_chosen() -> None:
    """Each member times its own candidates. A different choice must not make a member wait for sums that its peers do
    not send.
    """
    orders = []
    for options in ({"fused": True}, {"fused": False}, {"fused": True, "deterministic": True}):
        lowering, store = lower(50, 4, 64, training=True, group=FAKE_GROUP, **options)  # type: ignore[arg-type]
        names = {buffer: name for name, buffer in store.gradients.items()}
        orders.append([[names.get(buffer, str(buffer.shape)) for buffer in launch.writes]
                       for launch in lowering.program.launches if launch.operation.startswith("group_")])
    assert orders[0] == orders[1] == orders[2]


@pytest.mark.parametrize("training", [True, False])
def test_without_a_group_nothing_is_launched_for_it(training: bool) -> None:
    alone, grouped = (lower(18, 4, 64, training, group=group)[0].program for group in (None, FAKE_GROUP))
    steps = [[(launch.node, launch.operation) for launch in program.launches] for program in (alone, grouped)]
    assert not any(operation.startswith("group_") for _, operation in steps[0])
    assert steps[0] == [step for step in steps[1] if not step[1].startswith("group_")]
    if not training:
        assert steps[0] == steps[1], "inference has the running statistics"


def test_too_many_channels_are_refused() -> None:
    x = mx.sym.Convolution(mx.sym.Variable("data"), kernel=(1, 1), num_filter=MAX_VALUES + 8, no_bias=True,
                           layout="NHWC", name="conv")
    x = mx.sym.Flatten(mx.sym.BatchNorm(x, axis=3, fix_gamma=False, name="wide"))
    graph = Graph.from_json(mx.sym.SoftmaxOutput(mx.sym.FullyConnected(x, num_hidden=8), name="softmax").tojson())
    shapes: dict[str, tuple[int, ...]] = {"data": (2, 1, 1, 8), "softmax_label": (2,)}
    lower_graph(graph, shapes, training=True)
    with pytest.raises(GraphError, match="BatchNorm 'wide' has 8200 channels: a group shares 8192 at most$"):
        lower_graph(graph, shapes, training=True, group=FAKE_GROUP)


def test_sizes_are_those_of_the_kernel() -> None:
    source = (SOURCES / "batch_norm_group.cu").read_text()
    for name in ("THREADS", "MAX_ARRAYS", "MAX_VALUES", "MAX_MEMBERS"):
        found = re.search(rf"\b{name} = (\d+)", source)
        assert found and int(found[1]) == getattr(statistics_group, name)


class FakeGpu:
    """The parts of a GPU that `StatisticsGroup` uses; `unreachable` and `closed` are bus ids and handles that it cannot
    use."""

    unreachable: str | None = None
    closed: bytes | None = None

    def __init__(self, device_id: int) -> None:
        self.device_id, self.device = device_id, SimpleNamespace(pci_bus_id=f"bus {device_id}")

    def allocate(self, num_bytes: int) -> int:
        assert num_bytes % (2 << 20) == 0
        return 1000 + self.device_id

    def can_access(self, bus_id: str) -> bool:
        return bus_id != self.unreachable

    def open_shared(self, handle: bytes) -> int:
        if handle == self.closed:
            raise RuntimeError("CUDA error 201: invalid device context")
        return 7000 + handle[0]

    def share(self, address: int) -> bytes:
        return bytes([self.device_id])

    def pinned(self, num_bytes: int) -> np.ndarray:
        return np.full(num_bytes, 255, np.uint8)

    def fill(self, address: int, byte: int, num_bytes: int) -> None: ...
    def synchronize(self) -> None: ...


def test_joining(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics_group, "Gpu", FakeGpu)
    group, *others = (StatisticsGroup(device_id) for device_id in (5, 6, 7))
    invitations = [others[0].invitation, group.invitation, others[1].invitation]
    group.join(invitations, own=1)
    group.check()
    mailboxes, own, size, *_, num_values = group.arguments(520)
    assert list(mailboxes.of[:4]) == [7006, 1005, 7007, None]
    assert (own.value, size.value, group.size, num_values.value) == (1, 3, 3, 520)

    monkeypatch.setattr(FakeGpu, "closed", invitations[2].handle)
    with pytest.raises(GraphError, match="^the memory of GPU bus 7 cannot be opened from another process .CUDA error"):
        group.join(invitations, own=1)
    monkeypatch.setattr(FakeGpu, "unreachable", "bus 7")
    with pytest.raises(GraphError, match="^GPU bus 5 cannot write into the memory of GPU bus 7, .*: leave out --bn-g"):
        group.join(invitations, own=1)


# --- the exchange: members are streams of one GPU ---


class Member:
    def __init__(self, library: KernelLibrary, gpu: Gpu, limit_seconds: float) -> None:
        self.gpu, self.group = gpu, StatisticsGroup(gpu.device_id, limit_seconds)
        self._library = library

    def exchange(self, *arrays: int, values: int) -> None:
        pointers = (*arrays, *(0,) * (4 - len(arrays)))
        self._launch("group_mean", values, *pointers)

    def exchange_statistics(self, sums: int, about_mean: bool, result: int, rows: int, channels: int) -> None:
        self._launch("group_statistics", channels, sums, ctypes.c_bool(about_mean), result, ctypes.c_uint32(rows))

    def _launch(self, kernel: str, values: int, *operands: Any) -> None:
        grid = (max(1, -(-values // THREADS)), 1, 1)
        self._library.get("batch_norm_group.cu", kernel).launch(
            grid, (THREADS, 1, 1), *operands, *self.group.arguments(values))


@pytest.fixture
def make_members(tmp_path: Any) -> Any:
    """Members of one group, each with its own stream. Their kernel is loaded beforehand: loading it later would wait
    for a member that waits for another one."""
    def make(count: int, limit_seconds: float = 5.0) -> list[Member]:
        cache = Cache("tests", tmp_path)
        gpus = [Gpu() for _ in range(count)]  # streams created in a row do not share a queue
        members = [Member(KernelLibrary(gpu, cache), gpu, limit_seconds) for gpu in gpus]
        for own, member in enumerate(members):
            member.group.connect([other.group.mailbox for other in members], own)
            member.exchange(values=0)
            member.exchange_statistics(0, True, 0, rows=1, channels=0)
            member.gpu.synchronize()
        return members

    return make


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("count", [2, 3, 5])
def test_exchange(make_members: Any, count: int, rng: np.random.Generator) -> None:
    """Many exchanges in a row, of changing sizes, with one member sometimes far ahead of the others."""
    random = rng
    members = make_members(count)
    expected: list[np.ndarray] = []
    addresses: list[list[list[int]]] = []  # by exchange, member, array
    for _ in range(60):
        values = int(random.choice([1, 8, 64, 256, 520, 2048, MAX_VALUES]))
        num_arrays = int(random.choice([1, 2, 4]))
        x = random.normal(0, 10.0 ** random.integers(-4, 5), (count, num_arrays, values)).astype(np.float32)
        x[0, 0, 0] = random.choice([np.inf, np.nan, -0.0, 1e-42])
        expected.append(x)
        addresses.append([])
        for member, arrays in zip(members, x, strict=True):
            addresses[-1].append([member.gpu.allocate(array.nbytes) for array in arrays])
            for address, array in zip(addresses[-1][-1], arrays, strict=True):
                member.gpu.upload(address, array)
    for first in range(0, 60, 20):
        for own in random.permutation(count):
            for number in range(first, first + 20):
                members[own].exchange(*addresses[number][own], values=expected[number].shape[2])
    for x, of_members in zip(expected, addresses, strict=True):
        got = np.stack([[member.gpu.download(address, x.shape[2:], np.float32) for address in own]
                        for member, own in zip(members, of_members, strict=True)])
        assert all(member.tobytes() == got[0].tobytes() for member in got), "all have the same bits"
        wanted = x.astype(np.float64).mean(0)
        finite = np.isfinite(wanted)
        assert np.array_equal(np.isnan(wanted), np.isnan(got[0])) and np.array_equal(finite, np.isfinite(got[0]))
        # each of `count` additions and the division is rounded
        bound = (count + 1) * (2.0**-24 * np.abs(x.astype(np.float64)).sum(0) + 2.0**-149)
        assert (np.abs(got[0] - wanted)[finite] <= bound[finite]).all()
    for member in members:
        member.group.check()


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("ratio", [1, 100, 1000])
@pytest.mark.parametrize("count", [2, 5])
def test_exchange_of_statistics(make_members: Any, count: int, ratio: int) -> None:
    """The members' means differ and are `ratio` times their deviation. One member has plain sums, as cuDNN computes
    them."""
    random = np.random.default_rng(ratio)
    rows, channels = 700, 300
    x = random.normal(ratio * random.choice([-1, 1], channels) + random.normal(0, 1, (count, 1, channels)), 1.0,
                      (count, rows, channels)).astype(np.float32).astype(np.float64)
    members, results = make_members(count), []
    for own, (member, values) in enumerate(zip(members, x, strict=True)):
        is_plain = own == 1 and ratio == 1
        own_sums = (channel_sums if is_plain else sums_about_mean)(values, 1).astype(np.float32)
        sums, result = member.gpu.allocate(own_sums.nbytes), member.gpu.allocate(4 * 3 * channels)
        member.gpu.upload(sums, own_sums)
        results.append((sums, result, not is_plain))
    for member, (sums, result, about_mean) in zip(members, results, strict=True):
        member.exchange_statistics(sums, about_mean, result, rows, channels)
    got = [member.gpu.download(result, (3, channels), np.float32)
           for member, (_, result, _) in zip(members, results, strict=True)]
    assert all(member.tobytes() == got[0].tobytes() for member in got), "all have the same bits"
    zero, squares, mean = got[0].astype(np.float64)
    var = squares / rows
    assert not zero.any()
    # Sent values are rounded: means to 2^-24 of themselves, which is the error of their distances.
    assert np.max(np.abs(mean - x.mean((0, 1)))) < 4 * 2.0**-24 * ratio + 1e-6
    assert np.max(np.abs(var / x.var((0, 1)) - 1)) < 1e-5 + 8 * 2.0**-24 * ratio
    for member in members:
        member.group.check()


@pytest.mark.gpu
@pytest.mark.alone
def test_a_lost_member_is_told_of_and_not_waited_for(make_members: Any) -> None:
    present, absent = make_members(2, limit_seconds=0.2)
    sums = [present.gpu.allocate(4 * 300) for _ in range(20)]
    started = time.monotonic()
    for address in sums:
        present.exchange(address, values=300)
    present.gpu.synchronize()
    seconds = time.monotonic() - started
    assert 0.2 <= seconds < 1, "one wait, not twenty"
    assert np.isnan(present.gpu.download(sums[-1], (300,), np.float32)).all()
    with pytest.raises(GraphError, match="^GPU 0 has waited 0.2 s for the BatchNorm statistics of another GPU of its "
                                         "group of 2: .*go on from the last checkpoint"):
        present.group.check()
    absent.group.check()
    absent.group.give_up()
    started = time.monotonic()
    absent.exchange(sums[0], values=300)  # the other member is far beyond this exchange
    absent.gpu.synchronize()
    assert time.monotonic() - started < 0.2

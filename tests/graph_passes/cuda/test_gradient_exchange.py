"""Gradients averaged by GPUs in each other's memory: the order of copies, flags and kernels, in a simulation in which
members are fast and slow at random. The exchange itself, between processes: tests/train/test_multi_gpu.py."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from common.disk_cache import Cache
from graph_passes import GraphError
from graph_passes.executors.cuda import gradient_exchange
from graph_passes.executors.cuda.buckets import Bucket
from graph_passes.executors.cuda.device import Gpu
from graph_passes.executors.cuda.gradient_exchange import BLOCKS, FLAG_BYTES, THREADS, GradientExchange
from graph_passes.executors.cuda.kernels import SOURCES, KernelLibrary
from graph_passes.executors.cuda.parameters import VECTOR
from graph_passes.executors.cuda.peer_memory import MAX_MEMBERS, Invitation

SHARED = "graph_passes.executors.cuda.peer_memory"
DTYPES = {"float16": np.float16, "float32": np.float32}
Operation = tuple[Callable[[], bool], Callable[[], None]]  # can it run, and what it does


class Event:
    def __init__(self) -> None:
        self.asked, self.fired = 0, 0  # how often it was recorded, and how often that has been reached


class Machine:
    """The memory of all GPUs, one array, and their streams: queues of operations."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = np.random.default_rng().integers(0, 256, num_bytes, np.uint8)
        self.used = 0
        self.streams: list[list[Operation]] = []

    def array(self, address: int, count: int, dtype: Any) -> np.ndarray:
        return self.memory[address : address + count * np.dtype(dtype).itemsize].view(dtype)

    def run(self, random: np.random.Generator) -> None:
        """Until nothing is left; whoever can go on does so by chance."""
        while any(self.streams):
            ready = [stream for stream in self.streams if stream and stream[0][0]()]
            assert ready, "all wait for each other"
            stream = ready[random.integers(len(ready))]
            for _ in range(random.integers(1, 6)):  # some are ahead at times
                if stream and stream[0][0]():
                    stream.pop(0)[1]()


class SimulatedGpu:
    """A stream of a `Machine`, which does what the exchange asks of a GPU; also its own library of kernels."""

    def __init__(self, machine: Machine, device_id: int) -> None:
        self.machine, self.device_id = machine, device_id
        self.device = SimpleNamespace(pci_bus_id=f"bus {device_id}")
        self.stream: list[Operation] = []
        machine.streams.append(self.stream)

    def do(self, action: Callable[[], None], when: Callable[[], bool] = lambda: True) -> None:
        self.stream.append((when, action))

    def allocate(self, num_bytes: int) -> int:
        address, self.machine.used = self.machine.used, self.machine.used + num_bytes
        assert self.machine.used <= self.machine.memory.size
        return address

    def fill(self, address: int, byte: int, num_bytes: int) -> None:
        self.machine.memory[address : address + num_bytes] = byte

    def synchronize(self) -> None:
        while self.stream:
            can_run, action = self.stream.pop(0)
            assert can_run(), "waits for another member"
            action()

    def share(self, address: int) -> tuple[bytes, int]:
        return bytes([self.device_id]), address

    def open_shared(self, handle: bytes) -> int:
        return 0

    def can_access(self, bus_id: str) -> bool:
        return True

    def copy(self, to: int, source: int, num_bytes: int) -> None:
        def action() -> None:
            self.machine.memory[to : to + num_bytes] = self.machine.memory[source : source + num_bytes]

        self.do(action)

    def raise_flag(self, address: int, value: int) -> None:
        self.do(lambda: self.machine.array(address, 1, np.uint32).fill(value))

    def wait_for_flag(self, address: int, value: int) -> None:
        self.do(lambda: None, lambda: self.machine.array(address, 1, np.uint32)[0] >= value)

    def record(self, event: Event) -> None:
        event.asked += 1
        self.do(lambda: setattr(event, "fired", event.fired + 1))

    def wait_for(self, event: Event) -> None:
        latest = event.asked
        self.do(lambda: None, lambda: event.fired >= latest)

    def get(self, source: str, expression: str) -> Any:
        name, dtype = re.fullmatch(r"(\w+)<(half|float)>", expression).groups()  # type: ignore[union-attr]
        kernel = getattr(self, name)
        return SimpleNamespace(launch=lambda grid, block, *arguments: kernel(
            {"half": np.float16, "float": np.float32}[dtype], grid[0],
            *(getattr(value, "value", value) for value in arguments)))

    def average_part(self, dtype: Any, blocks: int, part: int, inbox: int, stride: int, own: int, size: int,
                     vectors: int) -> None:
        assert (blocks - 1) * THREADS < max(1, vectors) <= max(1, blocks) * THREADS
        self.do(lambda: self.average(dtype, part, inbox, stride, own, size, vectors))

    def average_at_once(self, dtype: Any, blocks: int, bucket: int, inboxes: Any, flags: Any, stride: int, own: int,
                        size: int, number: int, vectors: int) -> None:
        machine, others = self.machine, [member for member in range(size) if member != own]
        item = np.dtype(dtype).itemsize

        def flags_of(member: int, sender: int) -> np.ndarray:
            return machine.array(flags.of[member] + FLAG_BYTES * BLOCKS * sender, BLOCKS, np.uint32)[:blocks]

        def send(member: int) -> None:
            place = inboxes.of[member] + own * stride * item
            machine.array(place, VECTOR * vectors, dtype)[:] = machine.array(bucket, VECTOR * vectors, dtype)
            flags_of(member, own)[:] = number

        for member in others:
            self.do(lambda member=member: send(member))  # type: ignore[misc]
        self.do(lambda: self.average(dtype, bucket, inboxes.of[own], stride, own, size, vectors),
                lambda: all((flags_of(own, member) >= number).all() for member in others))

    def average(self, dtype: Any, values: int, inbox: int, stride: int, own: int, size: int, vectors: int) -> None:
        mine, item = self.machine.array(values, VECTOR * vectors, dtype), np.dtype(dtype).itemsize
        total = np.zeros(mine.size, np.float32)
        for member in range(size):
            total += mine if member == own else self.machine.array(inbox + member * stride * item, mine.size, dtype)
        mine[:] = total / np.float32(size)


def simulate(random: np.random.Generator, size: int, steps: int) -> None:
    """Steps of `size` members, with fresh gradients in each and the means compared with what they are to be."""
    machine = Machine(1 << 25)
    sizes = [int(VECTOR * random.integers(1, 90)) for _ in range(random.integers(1, 6))]
    dtypes = [str(random.choice(list(DTYPES))) for _ in sizes]
    sent = [[random.standard_normal((size, count)).astype(DTYPES[dtype])
             for count, dtype in zip(sizes, dtypes, strict=True)] for _ in range(steps)]
    members, got = [], np.empty((steps, size, len(sizes)), object)
    for own in range(size):
        gpu, step_stream = SimulatedGpu(machine, own), SimulatedGpu(machine, own)
        buckets = [Bucket(f"bucket {i}", gpu.allocate(4 * sizes[i]), sizes[i], dtypes[i], Event(), Event())
                   for i in range(len(sizes))]
        members.append((step_stream, GradientExchange(gpu, gpu, buckets, size), buckets))  # type: ignore[arg-type]
    invitations = [exchange.invitations for _, exchange, _ in members]
    for own, (step_stream, exchange, buckets) in enumerate(members):
        exchange.join(invitations, own)
        for step in range(steps):
            arrays = [machine.array(bucket.address, bucket.num_elements, DTYPES[bucket.dtype]) for bucket in buckets]
            for i, bucket in enumerate(buckets):
                step_stream.do(lambda step=step, own=own, i=i, arrays=arrays:  # type: ignore[misc]
                               np.copyto(arrays[i], sent[step][i][own]))
                step_stream.record(bucket.ready)
                exchange.start(bucket)
            for bucket in buckets:
                step_stream.wait_for(bucket.done)
            for i in range(len(buckets)):
                step_stream.do(lambda step=step, own=own, i=i, arrays=arrays:  # type: ignore[misc]
                               got.__setitem__((step, own, i), arrays[i].copy()))
    machine.run(random)
    for step in range(steps):
        for i, dtype in enumerate(dtypes):
            wanted = sent[step][i].astype(np.float64).mean(0)
            for own in range(size):
                assert got[step, own, i].tobytes() == got[step, 0, i].tobytes(), "all have the same bits"
            # Sums in fp32, then one rounding to the gradients' own type.
            tolerance = {"float16": 2.0**-11, "float32": size * 2.0**-23}[dtype]
            np.testing.assert_allclose(got[step, 0, i].astype(np.float64), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_order(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """No member waits forever, and none reads or overwrites too early, however fast each of them is."""
    monkeypatch.setattr(gradient_exchange, "AT_ONCE_BYTES", 500)
    monkeypatch.setattr(f"{SHARED}.SHARED_UNIT", 16)
    random = np.random.default_rng()
    for _ in range(12):
        simulate(random, size, steps=5)


def test_sizes_are_those_of_the_kernel() -> None:
    source = (SOURCES / "gradient_exchange.cu").read_text()
    for name, value in (("THREADS", THREADS), ("BLOCKS", BLOCKS), ("MAX_MEMBERS", MAX_MEMBERS)):
        found = re.search(rf"\b{name} = (\d+)", source)
        assert found and int(found[1]) == value


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimulatedGpu(Machine(1 << 24), 5)
    bucket = Bucket("others", 0, 64, "float32", Event(), Event())
    with pytest.raises(GraphError, match="^17 GPUs are more than the 16 that can average .*: use --all-reduce nccl$"):
        GradientExchange(gpu, gpu, [bucket], 17)  # type: ignore[arg-type]
    exchange = GradientExchange(gpu, gpu, [bucket], 2)  # type: ignore[arg-type]
    invitations = [exchange.invitations, [Invitation("bus 6", b"", 0)]]

    def fail(*_: Any) -> Any:
        raise RuntimeError("CUDA error 201: invalid device context")

    monkeypatch.setattr(gpu, "open_shared", fail)
    with pytest.raises(GraphError, match="^the memory of GPU bus 6 cannot be opened from another process .CUDA error"):
        exchange.join(invitations, 0)
    monkeypatch.setattr(gpu, "can_access", lambda bus_id: False)
    with pytest.raises(GraphError, match="^GPU bus 5 cannot write into the memory of GPU bus 6, which averaging gradi"):
        exchange.join(invitations, 0)
    monkeypatch.setattr(gpu, "share", fail)
    with pytest.raises(GraphError, match="^GPU 5 cannot share memory with other processes .*: use --all-reduce nccl$"):
        _ = exchange.invitations


@pytest.mark.gpu
@pytest.mark.parametrize("vectors", [5, 100_000])
def test_giving_up_ends_the_wait_for_a_lost_member(tmp_path: Any, vectors: int) -> None:
    step, gpu, gpu_of_other = Gpu(), Gpu(), Gpu()
    kernels = KernelLibrary(gpu, Cache("tests", tmp_path))
    bucket = Bucket("only", step.allocate(4 * VECTOR * vectors), VECTOR * vectors, "float32", step.timing_event(),
                    step.timing_event())
    exchange, other = (GradientExchange(stream, kernels, [bucket], 2) for stream in (gpu, gpu_of_other))
    exchange.connect([exchange.shared, other.shared], 0)
    step.record(bucket.ready)
    exchange.start(bucket)
    step.wait_for(bucket.done)
    last = step.record_event()
    time.sleep(0.2)
    assert not last.is_done
    started = time.monotonic()
    exchange.give_up()
    step.synchronize()
    assert time.monotonic() - started < 1

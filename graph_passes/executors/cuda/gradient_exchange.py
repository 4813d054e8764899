"""The mean of gradients over the GPUs of one machine, without NCCL: they write into each other's memory.

    exchange = executor.gradient_exchange(size)             # in each process
    exchange.join(invitations, own)                         # those of all members, in the same order everywhere
    exchange.start(bucket)                                  # all members the same buckets, in the same order

NCCL's all-reduce is a kernel, which takes multiprocessors from the backward pass for half a millisecond. Here copy
engines move the bytes, and the multiprocessors only add up what has arrived (docs/multi_gpu.md has the times of both):

1. Of a bucket with n equal parts, each GPU copies part m into the inbox of member m,
2. waits until the n - 1 others have put theirs into its own inbox, and replaces its own part by the mean,
3. copies that into the buckets of the others,
4. and waits until it has theirs.

That is a reduce-scatter and an all-gather; each GPU sends 2 (n - 1) / n of the bucket, as in a ring. Every part is
averaged on one GPU, so all have the same bits; it is added up in fp32 and rounded once. A small bucket, which nothing
hides, is exchanged by one kernel, since so many copies and waits would take longer: everybody writes all of it into
every inbox (what others call one-shot).

Everything is enqueued on a stream of the exchange's own; no host waits. Where a GPU waits, it is for a flag in its own
memory: a member writes the number of the exchange there, behind what it has sent.

Why nothing is overwritten that is still needed: a GPU begins exchange k + 1 when it has finished k, that is, has heard
from all members in k, and those had finished k - 1 before. So when k + 1 begins all members are done with k - 1, and
small buckets take one of two inboxes in turn. When a copied exchange is finished at one member, all have added up what
was in their inboxes, since they have sent the result; and a mean is written at a member who has sent its own values.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

from graph_passes.errors import GraphError
from graph_passes.executors.cuda.buckets import Bucket
from graph_passes.executors.cuda.device import Gpu
from graph_passes.executors.cuda.kernels import KernelLibrary, count, instance
from graph_passes.executors.cuda.parameters import VECTOR
from graph_passes.executors.cuda.peer_memory import MAX_MEMBERS, Addresses, Invitation, PeerMemory
from graph_passes.passes.precision import ITEM_BYTES

THREADS, BLOCKS = 512, 32  # of gradient_exchange.cu
AT_ONCE_BYTES = 2**20  # up to which a bucket is exchanged by one kernel
FLAG_BYTES = 4
FLAGS_BYTES = FLAG_BYTES * MAX_MEMBERS * (2 + BLOCKS)
GIVEN_UP = 0x3F  # as every byte of a flag: beyond the number of any exchange, which is below 1e9
NEEDED_BY, WAY_OUT = "averaging gradients without NCCL needs", "use --all-reduce nccl"  # in messages


class GradientExchange:
    """This process's part in it. It stays for as long as the process: others may have its memory open."""

    description = "by the GPUs in each other's memory"

    def __init__(self, gpu: Gpu, kernels: KernelLibrary, buckets: Sequence[Bucket], size: int) -> None:
        """Between `size` members. `gpu` has a stream for this alone, on which `kernels` are launched.

        Raises GraphError for more than MAX_MEMBERS, and where the driver has no flags for streams.
        """
        if size > MAX_MEMBERS:
            raise GraphError(f"{size} GPUs are more than the {MAX_MEMBERS} that can average gradients without NCCL: "
                             f"{WAY_OUT}")
        self._gpu, self._size, self._own = gpu, size, 0
        self._number = 0  # of the latest exchange
        self._kernels = {(name, dtype): kernels.get("gradient_exchange.cu", instance(name, dtype))
                         for name in ("average_part", "average_at_once")
                         for dtype in dict.fromkeys(bucket.dtype for bucket in buckets)}
        self._copied = [bucket for bucket in buckets if bucket.num_bytes > AT_ONCE_BYTES]
        self._small_bytes = max((bucket.num_bytes for bucket in buckets if bucket not in self._copied), default=0)
        self._part_bytes = max((self._part(bucket, size - 1).num_bytes for bucket in self._copied), default=0)
        self._part_inboxes = FLAGS_BYTES + 2 * size * self._small_bytes
        self._peer_memory = PeerMemory(gpu, NEEDED_BY, WAY_OUT)
        # Addresses of what the other members write: flags and inboxes, and the buckets that are copied.
        self.shared = [self._peer_memory.allocate(self._part_inboxes + size * self._part_bytes),
                        *(bucket.address for bucket in self._copied)]
        self._peers: Sequence[Sequence[int]] = [self.shared]  # the same of each member, as this process knows it
        try:
            gpu.raise_flag(self.shared[0], 0)
        except RuntimeError as error:
            raise GraphError(f"streams of GPU {gpu.device_id} can raise no flags ({error}), which {NEEDED_BY}: "
                             f"{WAY_OUT}") from None
        # Launched once for nothing: loaded later, a kernel would wait for the GPU, which may wait for another one.
        for bucket in {bucket.dtype: replace(bucket, num_elements=0) for bucket in buckets}.values():
            self._average_in_parts(bucket)
            self._average_at_once(bucket)
        gpu.synchronize()

    @property
    def invitations(self) -> list[Invitation]:
        """Raises GraphError where the GPU's memory cannot be shared between processes."""
        return [self._peer_memory.share(address) for address in self.shared]

    def join(self, invitations: Sequence[Sequence[Invitation]], own: int) -> None:
        """`invitations`: those of all members; `own`: which of them is this process.

        Raises GraphError for a GPU whose memory this one cannot write.
        """
        self.connect([self.shared if member == own else [self._peer_memory.open(each) for each in of_member]
                      for member, of_member in enumerate(invitations)], own)

    def connect(self, peers: Sequence[Sequence[int]], own: int) -> None:
        """The same with addresses that this process can use already."""
        self._peers, self._own = peers, own

    def start(self, bucket: Bucket) -> None:
        """Replace the gradients by their mean over all members once `bucket.ready` fires, then record `bucket.done`."""
        self._number += 1
        self._gpu.wait_for(bucket.ready)
        if bucket in self._copied:
            self._average_in_parts(bucket)
        else:
            self._average_at_once(bucket)
        self._gpu.record(bucket.done)

    def wait(self, bucket: Bucket) -> None:
        """`start` has recorded `bucket.done`."""

    def give_up(self) -> None:
        """End all waiting, from now on: after another process was lost. Gradients are worth nothing then."""
        Gpu(self._gpu.device_id).fill(self.shared[0], GIVEN_UP, FLAGS_BYTES)  # its stream does not wait

    def _average_in_parts(self, bucket: Bucket) -> None:
        gpu, own, number = self._gpu, self._own, self._number
        for member in self._others:
            part = self._part(bucket, member)
            gpu.copy(self._part_inbox(member, own), part.address, part.num_bytes)
            gpu.raise_flag(self._flag(member, 0, own), number)
        for member in self._others:
            gpu.wait_for_flag(self._flag(own, 0, member), number)
        part = self._part(bucket, own)
        vectors = part.num_elements // VECTOR
        stride = self._part_bytes // ITEM_BYTES[bucket.dtype]
        self._kernels["average_part", bucket.dtype].launch(
            (max(1, -(-vectors // THREADS)), 1, 1), (THREADS, 1, 1), part.address, self._part_inbox(own, 0),
            ctypes.c_int64(stride), ctypes.c_int(own), ctypes.c_int(len(self._peers)), count(vectors))
        for member in self._others:
            target = self._peers[member][1 + self._copied.index(bucket)]
            gpu.copy(target + part.address - bucket.address, part.address, part.num_bytes)
            gpu.raise_flag(self._flag(member, 1, own), number)
        for member in self._others:
            gpu.wait_for_flag(self._flag(own, 1, member), number)

    def _average_at_once(self, bucket: Bucket) -> None:
        vectors = bucket.num_elements // VECTOR
        inboxes, flags = Addresses(), Addresses()
        for member, (memory, *_) in enumerate(self._peers):
            inboxes.of[member] = memory + FLAGS_BYTES + self._number % 2 * self._size * self._small_bytes
            flags.of[member] = self._flag(member, 2, 0)
        self._kernels["average_at_once", bucket.dtype].launch(
            (min(BLOCKS, max(1, -(-vectors // THREADS))), 1, 1), (THREADS, 1, 1), bucket.address, inboxes, flags,
            ctypes.c_int64(self._small_bytes // ITEM_BYTES[bucket.dtype]), ctypes.c_int(self._own),
            ctypes.c_int(len(self._peers)), count(self._number), count(vectors))

    @property
    def _others(self) -> list[int]:
        """Beginning with the next one: not all send to the same member first."""
        size = len(self._peers)
        return [(self._own + i) % size for i in range(1, size)]

    def _part(self, bucket: Bucket, member: int) -> Bucket:
        """The part of a bucket that a member averages."""
        vectors = bucket.num_elements // VECTOR
        first, end = (VECTOR * (vectors * number // self._size) for number in (member, member + 1))
        return replace(bucket, address=bucket.address + first * ITEM_BYTES[bucket.dtype], num_elements=end - first)

    def _part_inbox(self, member: int, sender: int) -> int:
        return self._peers[member][0] + self._part_inboxes + sender * self._part_bytes

    def _flag(self, member: int, kind: int, sender: int) -> int:
        """The address of a member's flag; `kind` 0: a part has arrived; 1: its mean; 2: the first of BLOCKS flags for a
        small bucket."""
        return self._peers[member][0] + FLAG_BYTES * (MAX_MEMBERS * kind + sender * (BLOCKS if kind == 2 else 1))

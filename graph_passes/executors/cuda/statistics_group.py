"""GPUs of one machine whose BatchNorms share the statistics of each batch, which they exchange themselves.

    group = StatisticsGroup(device_id)                      # in each process
    group.join(invitations, own)                            # those of all members, in the same order everywhere
    step = TrainingStep(graph, shapes, group=group)

Statistics are those of all images that the members have in a step. With n members that have `rows` rows each,

    mean = sum of mean_i / n,    var = sum of (var_i + (mean_i - mean)^2) / n                      over all members
    dx_i = gamma / sqrt(var + eps) * (dy_i - sum of dy / (n * rows) - x^_i * sum of dy * x^ / (n * rows))

(Ioffe and Szegedy, arXiv:1502.03167, where a mini-batch is that of the group), dy being a member's gradient of its own
mean loss, which is n times that of the group's. So on the way back it is the sums' means over the group that stand
where one GPU has its own sums: `kernels/batch_norm_group.cu` puts them there, and what reads them does not know of the
group. These sums are the gradients of gamma and beta as well. Their mean over the group may stay there: the optimizer
sees their mean over all processes, and groups are equally large, so that is the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from graph_passes.errors import GraphError
from graph_passes.executors.cuda.declarations import Declarations
from graph_passes.executors.cuda.device import Gpu

_CUDA = Declarations("batch_norm_group.cu")
MAX_MEMBERS, THREADS, MAX_ARRAYS, MAX_VALUES = _CUDA.values("MAX_MEMBERS", "THREADS", "MAX_ARRAYS", "MAX_VALUES")
SHARED_UNIT = 2 << 20  # bytes; what is shared should not lie in one piece of memory with anything else
# How long a member waits for another one before the run ends: longer than a checkpoint or a late batch keeps a process.
LIMIT_SECONDS = 60.0
NEEDED, WAY_OUT = "which common BatchNorm statistics need", "leave out --bn-group"  # in messages


class Mailboxes(ctypes.Structure):
    """The address of each member's mailbox, as the kernel's argument."""

    _fields_ = _CUDA.fields("Mailboxes")


class Invitation(NamedTuple):
    """What a process tells the others, so that their GPUs can write into its mailbox."""

    bus_id: str  # of its GPU
    handle: bytes  # of CUDA's interprocess communication


class StatisticsGroup:
    """This process's part in the group. It stays for as long as the process: others may have its memory open.

    Raises GraphError where the GPU's memory cannot be shared between processes.
    """

    def __init__(self, device_id: int, limit_seconds: float = LIMIT_SECONDS) -> None:
        self._gpu = Gpu(device_id)
        words = 2 * MAX_MEMBERS * MAX_ARRAYS * MAX_VALUES
        num_bytes = -(-(8 * words + 4 * MAX_VALUES // THREADS) // SHARED_UNIT) * SHARED_UNIT
        self.mailbox = self._gpu.allocate(num_bytes)
        self._gpu.fill(self.mailbox, 0, num_bytes)
        self._gpu.synchronize()  # before anybody writes into it
        self._numbers = self.mailbox + 8 * words
        self._fault = self._gpu.pinned(4)  # the GPU writes it, and reads it while it waits
        self._fault[:] = 0
        self._limit_seconds = limit_seconds
        self._mailboxes, self._own, self.size = Mailboxes(), 0, 1

    @property
    def invitation(self) -> Invitation:
        """Raises GraphError where memory cannot be shared between processes."""
        try:
            return Invitation(self._gpu.device.pci_bus_id, self._gpu.share(self.mailbox))
        except RuntimeError as error:
            raise GraphError(f"GPU {self._gpu.device_id} cannot share memory with other processes ({error}), {NEEDED}: "
                             f"{WAY_OUT}") from None

    def join(self, invitations: Sequence[Invitation], own: int) -> None:
        """Open the mailboxes of the others. `own`: which of the members is this process.

        Raises GraphError for a GPU whose memory this one cannot write.
        """
        self.connect([self.mailbox if member == own else self._open(invitation)
                      for member, invitation in enumerate(invitations)], own)

    def connect(self, mailboxes: Sequence[int], own: int) -> None:
        """Take the members' mailboxes, by addresses that this process can use. `own`: which of the members it is."""
        self.size, self._own = len(mailboxes), own
        self._mailboxes.of[: self.size] = list(mailboxes)

    def _open(self, invitation: Invitation) -> int:
        """The address, in this process, of another one's mailbox. Raises GraphError where this GPU cannot write it."""
        bus_id = invitation.bus_id
        if not self._gpu.can_access(bus_id):
            raise GraphError(f"GPU {self._gpu.device.pci_bus_id} cannot write into the memory of GPU {bus_id}, "
                             f"{NEEDED}: {WAY_OUT}")
        try:
            return self._gpu.open_shared(invitation.handle)
        except RuntimeError as error:
            raise GraphError(f"the memory of GPU {bus_id} cannot be opened from another process ({error}), {NEEDED}: "
                             f"run all processes in one container, or {WAY_OUT}") from None

    def arguments(self, num_values: int) -> tuple[Any, ...]:
        """Of the kernel `group_mean`, after its four arrays of so many floats each."""
        return (self._mailboxes, ctypes.c_int(self._own), ctypes.c_int(self.size), self._numbers,
                self._fault.ctypes.data, ctypes.c_uint64(round(self._limit_seconds * 1e9)), ctypes.c_int(num_values))

    def give_up(self) -> None:
        """End all waiting, from now on: after another process was lost."""
        self._fault.view(np.uint32)[0] = 1

    def check(self) -> None:
        """Raise GraphError where a wait has ended without an answer. For what the GPU has done so far."""
        if self._fault.any():
            raise GraphError(
                f"GPU {self._gpu.device_id} has waited {self._limit_seconds:g} s for the BatchNorm statistics of "
                f"another one of its group of {self.size}: a process hangs or has ended; go on from the last "
                "checkpoint with --resume and the run's folder")

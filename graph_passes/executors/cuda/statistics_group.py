"""GPUs of one machine that share BatchNorm's statistics of each batch and exchange them directly.

    group = StatisticsGroup(device_id)                      # in each process
    group.join(invitations, own)                            # of all members, in the same order everywhere
    step = TrainingStep(graph, shapes, group=group)

Statistics are computed over the images of all members in a step. With n members of `rows` rows each,

    mean = sum of mean_i / n,    var = sum of (var_i + (mean_i - mean)^2) / n                      over all members
    dx_i = gamma / sqrt(var + eps) * (dy_i - sum of dy / (n * rows) - x^_i * sum of dy * x^ / (n * rows))

(Ioffe and Szegedy, arXiv:1502.03167, with the group's images as the mini-batch). dy is a member's gradient of its own
mean loss, which is n times the gradient of the group's mean loss. So in the backward pass each sum is replaced by its
mean over the group. `kernels/batch_norm_group.cu` does this in place; the kernels that read the sums do not change. The
sums are also the gradients of gamma and beta. For these gradients the replacement is harmless, because the optimizer
uses their mean over all processes, and all groups have equal sizes.
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
SHARED_UNIT = 2 << 20  # bytes; shared memory should have an allocation of its own
# Time that a member waits for another member before the run ends. This is longer than a checkpoint or a late batch
# takes.
LIMIT_SECONDS = 60.0
NEEDED, WAY_OUT = "which common BatchNorm statistics need", "leave out --bn-group"  # parts of messages


class Mailboxes(ctypes.Structure):
    """The addresses of all members' mailboxes, as the kernel's argument."""

    _fields_ = _CUDA.fields("Mailboxes")


class Invitation(NamedTuple):
    """The data that other processes need so that their GPUs can write into this process's mailbox."""

    bus_id: str  # PCI bus id of this process's GPU
    handle: bytes  # handle of CUDA's interprocess communication


class StatisticsGroup:
    """This process's part of the group. The object lives as long as the process, because other processes may have
    opened its memory.

    Raises GraphError if the GPU's memory cannot be shared between processes.
    """

    def __init__(self, device_id: int, limit_seconds: float = LIMIT_SECONDS) -> None:
        self._gpu = Gpu(device_id)
        words = 2 * MAX_MEMBERS * MAX_ARRAYS * MAX_VALUES
        num_bytes = -(-(8 * words + 4 * MAX_VALUES // THREADS) // SHARED_UNIT) * SHARED_UNIT
        self.mailbox = self._gpu.allocate(num_bytes)
        self._gpu.fill(self.mailbox, 0, num_bytes)
        self._gpu.synchronize()  # the mailbox must be ready before another member writes to it
        self._numbers = self.mailbox + 8 * words
        self._fault = self._gpu.pinned(4)  # the GPU writes and polls this word
        self._fault[:] = 0
        self._limit_seconds = limit_seconds
        self._mailboxes, self._own, self.size = Mailboxes(), 0, 1

    @property
    def invitation(self) -> Invitation:
        """This process's invitation. Raises GraphError if memory cannot be shared between processes."""
        try:
            return Invitation(self._gpu.device.pci_bus_id, self._gpu.share(self.mailbox))
        except RuntimeError as error:
            raise GraphError(f"GPU {self._gpu.device_id} cannot share memory with other processes ({error}), {NEEDED}: "
                             f"{WAY_OUT}") from None

    def join(self, invitations: Sequence[Invitation], own: int) -> None:
        """Open the other members' mailboxes. `own`: index of this process among the members.

        Raises GraphError if this GPU cannot write to the memory of another member's GPU.
        """
        self.connect([self.mailbox if member == own else self._open(invitation)
                      for member, invitation in enumerate(invitations)], own)

    def connect(self, mailboxes: Sequence[int], own: int) -> None:
        """Set the members' mailboxes by addresses of this process. `own`: index of this process among the members."""
        self.size, self._own = len(mailboxes), own
        self._mailboxes.of[: self.size] = list(mailboxes)

    def _open(self, invitation: Invitation) -> int:
        """The address, in this process, of another process's mailbox. Raises GraphError if this GPU cannot write to
        it."""
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
        """Arguments of the kernel `group_mean` after its four arrays of `num_values` floats each."""
        return (self._mailboxes, ctypes.c_int(self._own), ctypes.c_int(self.size), self._numbers,
                self._fault.ctypes.data, ctypes.c_uint64(round(self._limit_seconds * 1e9)), ctypes.c_int(num_values))

    def give_up(self) -> None:
        """Let all waits end at once from now on; called after another process was lost."""
        self._fault.view(np.uint32)[0] = 1

    def check(self) -> None:
        """Raise GraphError if a wait ended without an answer, in the work that the GPU has done so far."""
        if self._fault.any():
            raise GraphError(
                f"GPU {self._gpu.device_id} has waited {self._limit_seconds:g} s for the BatchNorm statistics of "
                f"another GPU of its group of {self.size}: a process hangs or has ended; go on from the last "
                "checkpoint with --resume and the run's folder")

"""Memory of a GPU into which the processes of this machine's other GPUs write."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

from graph_passes.errors import GraphError
from graph_passes.executors.cuda.device import Gpu

SHARED_UNIT = 2 << 20  # bytes; what is shared should not lie in one piece of memory with anything else
MAX_MEMBERS = 16  # GPUs that write to each other; of the kernels that do


class Addresses(ctypes.Structure):
    """One address for each member, as a kernel's argument."""

    _fields_ = (("of", ctypes.c_uint64 * MAX_MEMBERS),)


class Invitation(NamedTuple):
    """What a process tells the others, so that their GPUs can write into memory of its own."""

    bus_id: str  # of its GPU
    handle: bytes  # of CUDA's interprocess communication
    offset: int  # bytes in front of what is meant


@dataclass(frozen=True)
class PeerMemory:
    """`needed_by`: what shared memory is for; `way_out`: what its user can do where there is none. For the messages."""

    gpu: Gpu
    needed_by: str
    way_out: str

    def allocate(self, num_bytes: int) -> int:
        """Address of fresh zeros to be shared. Not to be freed: others may have it open."""
        num_bytes = -(-num_bytes // SHARED_UNIT) * SHARED_UNIT
        address = self.gpu.allocate(num_bytes)
        self.gpu.fill(address, 0, num_bytes)
        self.gpu.synchronize()  # before anybody writes into it
        return address

    def share(self, address: int) -> Invitation:
        """Raises GraphError where memory cannot be shared between processes."""
        try:
            return Invitation(self.gpu.device.pci_bus_id, *self.gpu.share(address))
        except RuntimeError as error:
            raise GraphError(f"GPU {self.gpu.device_id} cannot share memory with other processes ({error}), which "
                             f"{self.needed_by}: {self.way_out}") from None

    def open(self, invitation: Invitation) -> int:
        """The address, in this process, of another one's memory. Raises GraphError where this GPU cannot write it."""
        bus_id = invitation.bus_id
        if not self.gpu.can_access(bus_id):
            raise GraphError(f"GPU {self.gpu.device.pci_bus_id} cannot write into the memory of GPU {bus_id}, which "
                             f"{self.needed_by}: {self.way_out}")
        try:
            return self.gpu.open_shared(invitation.handle) + invitation.offset
        except RuntimeError as error:
            raise GraphError(f"the memory of GPU {bus_id} cannot be opened from another process ({error}), which "
                             f"{self.needed_by}: run all processes in one container, or {self.way_out}") from None

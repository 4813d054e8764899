"""Device memory that all work on a GPU's stream shares, one after the other."""

from __future__ import annotations

from collections.abc import Callable

from graph_passes.executors.cuda.device import Gpu

Place = Callable[[int], None]


class Arena:
    """One block of memory for all work whose results nobody needs afterwards: training steps and inference at every
    size, and the timing of kernels. It is as large as the largest request so far."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._address = 0
        self._tenants: list[Place] = []
        self.num_bytes = 0

    def reserve(self, num_bytes: int) -> int:
        """Address of this many bytes, with any contents, valid until the next call: a larger request may move the
        memory. Raises TransientError if they do not fit."""
        if num_bytes > self.num_bytes:
            self._gpu.check_free(num_bytes - self.num_bytes)  # checked before anything is freed
            if self.num_bytes:
                self._gpu.synchronize()
                self._gpu.free(self._address)
            self._address, self.num_bytes = self._gpu.allocate(num_bytes), num_bytes
            for place in self._tenants:
                place(self._address)
        return self._address

    def admit(self, num_bytes: int, place: Place) -> None:
        """Call `place` with the address of this many bytes, now and whenever they move, until `dismiss`."""
        place(self.reserve(num_bytes))
        self._tenants.append(place)

    def dismiss(self, place: Place) -> None:
        self._tenants.remove(place)

"""Device memory that all work on a GPU's stream uses in turn."""

from __future__ import annotations

from collections.abc import Callable

from graph_passes.executors.cuda.device import Gpu

Place = Callable[[int], None]


class Arena:
    """One block of memory for intermediate results, which no later work needs: for training steps and inference at
    every size, and for timing kernels. The block is as large as the largest request so far.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._address = 0
        self._tenants: list[Place] = []
        self.num_bytes = 0

    def reserve(self, num_bytes: int) -> int:
        """The address of `num_bytes` bytes with arbitrary contents. The address is valid until the next call, because a
        larger request may move the memory. Raises TransientError if the bytes do not fit.
        """
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
        """Call `place` with the address of `num_bytes` bytes, now and whenever the memory moves, until `dismiss`."""
        place(self.reserve(num_bytes))
        self._tenants.append(place)

    def dismiss(self, place: Place) -> None:
        self._tenants.remove(place)

"""The one exception for a user's mistake in `train`."""

from __future__ import annotations


class TrainError(Exception):
    """A mistake of the user, told in one sentence: what (the value), where, and what to do.

    `python -m train` prints it as `error: ...` on stderr and exits with code 2, without a stack trace. Of several
    processes each prints its own error; but with `on_all_ranks`, where all raise the same one, only rank 0 does.
    """

    def __init__(self, sentence: str, on_all_ranks: bool = False) -> None:
        super().__init__(sentence)
        self.on_all_ranks = on_all_ranks

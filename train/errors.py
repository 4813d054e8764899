"""The exceptions of `train` that end it with one sentence."""

from __future__ import annotations

from common.errors import UserError

EXIT_LOST_PROCESS = 3  # this process is well, but another one of its run has ended
EXIT_HUNG_PROCESS = 4  # a process of the run made no progress any more, and was killed


class TrainError(UserError):
    """A user's mistake. Of several processes each prints its own error; but with `on_all_ranks`, where all raise the
    same one, only rank 0 does."""

    def __init__(self, sentence: str, on_all_ranks: bool = False) -> None:
        super().__init__(sentence)
        self.on_all_ranks = on_all_ranks


class LostProcessError(TrainError):
    """Another process of this run has ended before its time; the same on all that are left."""

    exit_code = EXIT_LOST_PROCESS

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, on_all_ranks=True)


class NoHorovodError(TrainError):
    """Several processes were asked for without Horovod, which no rank has then."""

    def __init__(self, num_processes: int | str, reason: ImportError) -> None:
        super().__init__(f"{num_processes} processes need Horovod, which is not installed here ({reason}): run make "
                         "setup in a checkout of this project, which builds it or says what it lacks",
                         on_all_ranks=True)

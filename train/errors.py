"""Exceptions that end `train` with one sentence."""

from __future__ import annotations

from common.errors import UserError

EXIT_LOST_PROCESS = 3  # the process itself is not at fault; another process of its run has ended
EXIT_HUNG_PROCESS = 4  # a process of the run hung and was killed


class TrainError(UserError):
    """A user's mistake. Each process prints its own error. With `on_all_ranks`, all processes raise the same error, and
    only rank 0 prints it."""

    def __init__(self, sentence: str, on_all_ranks: bool = False) -> None:
        super().__init__(sentence)
        self.on_all_ranks = on_all_ranks


class LostProcessError(TrainError):
    """Another process of this run has ended too early. All remaining processes raise this error."""

    exit_code = EXIT_LOST_PROCESS

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, on_all_ranks=True)


class NoHorovodError(TrainError):
    """Several processes were requested, but Horovod is missing. All ranks raise this error."""

    def __init__(self, num_processes: int | str, reason: ImportError) -> None:
        super().__init__(f"{num_processes} processes need Horovod, which is not installed here ({reason}): run make "
                         "setup in a checkout of this project, which builds it or says what it lacks",
                         on_all_ranks=True)

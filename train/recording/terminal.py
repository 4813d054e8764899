"""The terminal output of a run: log lines, and a progress bar on an interactive terminal."""

from __future__ import annotations

from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from common.output import shows_bars
from train.recording.metrics import IMAGES, VALIDATION, WORDS, EpochRow, Speed, shown_perplexity


class Terminal:
    """Prints lines. A terminal also gets a progress bar below the lines; other outputs get no control codes.

    `num_epochs`: epochs of the whole run; None if the run's end is unknown (a benchmark ends when its figure is known).
    `examples`: IMAGES or WORDS. `tells_top5`: whether top-5 accuracy is shown.
    """

    def __init__(self, num_epochs: int | None, console: Console | None = None, examples: str = IMAGES,
                 tells_top5: bool = True) -> None:
        self.num_epochs = num_epochs
        self.examples = examples
        self.tells_top5 = tells_top5
        self.console = console or Console(highlight=False, soft_wrap=True)
        self.progress: Progress | None = None
        self._task: TaskID | None = None
        self._status = ""  # text beside the bar
        if shows_bars(self.console):
            name, status = TextColumn("{task.description}"), TextColumn("{task.fields[status]}")
            self.progress = Progress(name, BarColumn(20), MofNCompleteColumn(), status, console=self.console)
            self.progress.start()

    def say(self, text: str) -> None:
        """Print a line, above the progress bar if there is one."""
        self.console.print(text, markup=False)

    def begin_epoch(self, epoch: int, num_steps: int, steps_done: int) -> None:
        if self.progress:
            name = "benchmark" if self.num_epochs is None else f"epoch {epoch + 1}/{self.num_epochs}"
            self._task = self.progress.add_task(name, total=num_steps, completed=steps_done, status=self._status)

    def end_step(self) -> None:
        if self.progress and self._task is not None:
            self.progress.update(self._task, advance=1)

    def log_step(
        self, place: str, rate: Speed | None, loss: float | None, learning_rate: float, time_left: str,
        skipped_steps: int = 0
    ) -> None:
        """Print a log line. `time_left` is shown if `time_left` and `rate`, from which it is computed, are known.
        `skipped_steps`: how many of the line's steps changed no weight.
        """
        shown_rate = f"  {self.examples}/sec: {rate}" if rate else ""
        shown_loss = f"  loss {loss:.3f}" if loss is not None else ""
        shown_skipped = f"  {skipped_steps} skipped (overflow)" if skipped_steps else ""
        shown_left = f"  time left {time_left}" if rate and time_left else ""
        self.say(f"{place}{shown_rate}{shown_loss}  learning rate {learning_rate:.4g}{shown_skipped}{shown_left}")
        if rate:
            self._status = f"{rate.mean:.1f} {self.examples}/sec{shown_left}"  # fits into 80 columns with name and bar
        self.show()

    def show(self, activity: str = "") -> None:
        """Show an activity beside the bar; "": show the speed of the latest steps again."""
        if self.progress and self._task is not None:
            self.progress.update(self._task, status=activity or self._status)

    def end_epoch(self, row: EpochRow) -> None:
        """Print the line of a finished epoch."""
        if self.progress and self._task is not None:
            self.progress.remove_task(self._task)
            self._task = None
        parts = [f"epoch {row.epoch}/{self.num_epochs} done:"]
        if row.train_loss is not None:
            parts.append(f"train loss {row.train_loss:.3f}, {self._success(row.train_loss, row.train_top1)}")
        if found := row.evaluation:
            parts.append("| validation" if found.images == VALIDATION else f"| on the {found.images}:")
            parts.append(f"loss {found.loss:.3f}, {self._success(found.loss, found.top1, found.top5)}")
            if found.balanced_top1 is not None and self.examples == IMAGES:
                parts[-1] += f", balanced accuracy {found.balanced_top1:.1%}"
            parts[-1] += "".join(f", {name} {value:.4g}" for name, value in row.plugin_metrics.items())
        if count := row.skipped_images:
            parts.append(f"| {count:,} image{'s' * (count > 1)} skipped")
        self.say(" ".join([*parts, f"| {timedelta(seconds=round(3600 * row.hours))} so far"]))

    def _success(self, loss: float, top1: float | None, top5: float | None = None) -> str:
        """The run's main result: accuracy, or perplexity for a language model."""
        if self.examples == WORDS:
            return f"perplexity {shown_perplexity(loss)}"
        return f"top-1 {top1:.1%}" + ("" if top5 is None or not self.tells_top5 else f", top-5 {top5:.1%}")

    def close(self) -> None:
        if self.progress:
            self.progress.stop()

"""The parts of a report that are specific to a language model: perplexities, the network and its text."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

from train.recording.metrics import WORDS, RunRecord, perplexity, shown_perplexity
from train.report import plots
from train.report.document import Block, Heading, Plot, Table, duration

EVENT = "language_model"  # event in a run's metrics with the fields of `Facts`
PERPLEXITY, LOSS = "perplexity.png", "loss.png"
CAPTIONS = {
    PERPLEXITY: "exp of the mean loss of a word: in training between two log lines, in validation after an epoch.{cut}",
    LOSS: "Mean loss of a word, whose exp no number holds: in training between two log lines, in validation after an "
          "epoch.",
}


@dataclass(frozen=True)
class Facts:
    """Properties of network and text that the configuration does not contain."""

    precision: str
    parameters: int
    vocabulary: int  # number of words in the vocabulary
    training_words: int  # words per epoch
    validation_words: int
    unknown_share: float  # share of the validation words that are not in the vocabulary
    best_possible: float | None  # perplexity under the generator of the text; None: unknown

    @property
    def unknown_shown(self) -> str:
        """`unknown_share`, which is above 0, as text."""
        return f"{self.unknown_share:.1%}" if self.unknown_share >= 0.0005 else "less than 0.1%"


def facts(record: RunRecord) -> Facts | None:
    """The facts of the run's last session; None if it is not a language model's run."""
    if record.examples != WORDS:
        return None
    names = [field.name for field in fields(Facts)]
    found = [event for event in record.events if event["event"] == EVENT]
    return Facts(**{name: found[-1][name] for name in names}) if found else None


def figures(record: RunRecord, known: Facts) -> dict[str, Callable[[plots.Theme], plots.Drawing]]:
    """File name -> function that draws the plot; empty if the run has logged no loss."""
    if not record.loss_curve:
        return {}
    losses = [point.loss for point in record.loss_curve]
    losses += [row.val_loss for row in record.epochs if row.val_loss is not None]
    if math.isfinite(perplexity(max(losses))):
        return {PERPLEXITY: lambda theme: plots.perplexities(record, known.best_possible, theme)}
    return {LOSS: lambda theme: plots.loss(record, theme)}


def name(record: RunRecord) -> str:
    """The network's name."""
    layers = record.config["layers"]
    return f"Language model, {layers} LSTM layer{'s' * (layers > 1)} of {record.config['hidden']} units"


def tiles(record: RunRecord, known: Facts) -> list[tuple[str, str]]:
    """The main figures: the lowest validation perplexity, and the size of the network."""
    validated = {row.epoch: row.val_loss for row in record.epochs if row.val_loss is not None}
    found = []
    if validated:
        best = min(validated, key=lambda epoch: validated[epoch])
        found += [(_shown(validated[best]), f"perplexity in validation, epoch {best}")]
    return [*found, (f"{known.parameters / 1e6:.3g} M", "parameters")]


def blocks(record: RunRecord, known: Facts) -> list[Block]:
    """The plot, a table of the epochs, and a table on network and text."""
    top = plots.perplexity_top(record)
    is_cut = any(perplexity(point.loss) > top for point in record.loss_curve)
    cut = " The beginning, where it is much higher, is cut off." * is_cut
    found: list[Block] = [Plot(name, CAPTIONS[name].format(cut=cut)) for name in figures(record, known)]
    if record.epochs:
        found += [Table(("epoch", "time", "words/sec", "train perplexity", "val perplexity"), [
            (str(row.epoch), duration(3600 * row.hours),
             "" if row.images_per_sec is None else f"{row.images_per_sec:,.1f}",
             _shown(row.train_loss), _shown(row.val_loss)) for row in record.epochs])]
    config = record.config
    rows = [
        ("precision", known.precision),
        ("network", f"embedding of {config['hidden']}, {config['layers']} x LSTM of {config['hidden']} units, softmax "
                    "with the embedding's weights"),
        ("parameters", f"{known.parameters:,}"),
        ("vocabulary", f"{known.vocabulary:,} words"),
        ("text", config["text"]),
        ("words", f"{known.training_words:,} in an epoch, {known.validation_words:,} for validation"),
        ("batch", f"{config['sequences']} sequences of {config['steps']} words on each process"),
    ]
    if known.unknown_share:
        rows += [("unknown words", f"{known.unknown_shown} of those for validation, which count as one word")]
    if known.best_possible:
        rows += [("best possible", f"perplexity {known.best_possible:.2f}, under the generator of the text")]
    return [*found, Heading("Network and text"), Table(("", ""), rows)]


def to_dict(record: RunRecord, known: Facts) -> dict[str, Any]:
    """The values for report.json; a perplexity that does not fit into a float is null."""
    return {
        **asdict(known), "words_per_sec": record.speed()._asdict(),
        "perplexity": [{"epoch": row.epoch, "training": _finite(row.train_loss), "validation": _finite(row.val_loss)}
                       for row in record.epochs],
    }


def _shown(loss: float | None) -> str:
    return "" if loss is None else shown_perplexity(loss)


def _finite(loss: float | None) -> float | None:
    return perplexity(loss) if loss is not None and math.isfinite(perplexity(loss)) else None

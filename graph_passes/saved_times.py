"""Times that were measured on a GPU earlier, with which a cover can be shown on a machine without a GPU.

A file in `times/` has one kind of times, from one GPU. Kinds are never mixed: a kernel in isolation takes up to twice
as long as in a step. A kernel without a saved time is not a candidate, because a modelled time would decide wrongly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from graph_passes.candidates import Candidates
from graph_passes.choice import choices_of, chosen_of, fewest, format_choices, undecided
from graph_passes.problems import Tensors

FILE = Path(__file__).with_name("times") / "h100.json"


class SavedPrices:
    """Prices from saved times (`choice.py`), for inputs of these shapes; from the number of nodes if saved times are
    missing. `text` tells afterwards which prices were used."""

    def __init__(self, input_shapes: Mapping[str, Sequence[int]], dtype: str, file: Path = FILE) -> None:
        saved = json.loads(file.read_text())
        self._times: dict[str, float] = saved["times"]
        self._source = f"{saved['gpu']}, {saved['kind']} ({saved['source']})"
        self._input_shapes, self._dtype, self._text = input_shapes, dtype, ""

    def __call__(self, table: Candidates) -> list[float]:
        prices = self.times(table)
        price_of = dict(zip(table, prices, strict=True))
        if any(price_of[each] == math.inf for each in chosen_of(table, prices)):
            self._text = "No saved times suffice for this step: it is shown with the fewest nodes."
            return fewest(table)
        self._text = f"Chosen by saved times of {self._source}:\n{format_choices(choices_of(table, prices))}"
        return prices

    def times(self, table: Candidates) -> list[float]:
        """Milliseconds of each candidate that has rivals, infinite if none is saved; 0 for candidates that are taken
        anyway."""
        tensors, (open_places, sure) = Tensors(table, self._input_shapes), undecided(table)
        return [self._times.get(tensors.problem(each, self._dtype), math.inf) if place in open_places
                else 0.0 if place in sure else math.inf for place, each in enumerate(table)]

    def text(self) -> str:
        """The kernels that were taken, their times, their rivals' times, and the source of the times."""
        return self._text

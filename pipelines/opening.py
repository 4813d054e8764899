"""Opens the loader that a configuration asks for."""

from __future__ import annotations

from dataclasses import replace

from pipelines.dali_loader import DaliLoader
from pipelines.decoded import decode_once
from pipelines.errors import DataError
from pipelines.loader import Loader, LoaderConfig
from pipelines.sources import check_label_set, open_source
from pipelines.synthetic import SyntheticLoader
from pipelines.tuning import tune


def open_loader(config: LoaderConfig, shard: tuple[int, int] = (0, 1)) -> Loader:
    """The loader of a split; `shard` is (rank, number of processes). Raises DataError."""
    rank, size = shard
    if not 0 <= rank < size:
        raise DataError(f"shard {rank} of {size} does not exist; ranks go from 0 to the number of processes minus one")
    if config.data == "synthetic":
        if config.val_split or config.balance:
            raise DataError("synthetic images have a validation split and classes of equal size; leave out "
                            f"{'--val-split' if config.val_split else '--balance'}")
        check_label_set("synthetic", "synthetic", config.labels)
        return SyntheticLoader(config, shard)
    source = open_source(config.data, config.split, **config.reading)
    config = replace(config, first_label=source.first_label, labels=source.label_set)
    source = decode_once(config, source)
    return DaliLoader(tune(config, source, shard), shard, source)

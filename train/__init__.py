"""Trains, validates, measures, runs and exports ResNets: `python -m train --help`."""

from train.errors import TrainError

__all__ = ["TrainError"]

"""Train, validate, measure, run and export ResNets: `python -m train --help`."""

from train.errors import TrainError

__all__ = ["TrainError"]

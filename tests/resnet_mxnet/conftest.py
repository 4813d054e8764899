"""The fixtures of this folder."""

from library_run import light_training, net, run, trained  # noqa: F401  # pytest finds them here
from train_fixtures import tiny_data  # noqa: F401

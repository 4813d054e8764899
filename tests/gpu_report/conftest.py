"""The fixtures of this folder."""

from train_fixtures import (  # noqa: F401  # pytest finds them here
    light_run,
    narrow_network,
    run_train,
    tiny_data,
    undrawn,
)

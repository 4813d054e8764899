"""The step with the beginning of the network frozen, beside the whole step, in turn, in one process, on one GPU.

    python benchmarks/step_frozen.py

Measured as step_ingredients.py measures: the steps of `python -m train` on synthetic data, of the preset resnet50_90ep,
with `--freeze` and without. Writes results/<model>_fp16_b<batch>_frozen_1gpu.json, the step that trains the classifier
alone, whose peer is the whole step in the same turns, and as lines of the .jsonl file of that name both sides' step
times for each frozen beginning. The same command goes on where it was stopped.
"""

from __future__ import annotations

from record import run
from step_ingredients import Options, measure_all

from common.command_line import read_options

LAYERS = ("stem", "stage2", "stage3", "backbone")
FROZEN = {f"--freeze {layers}": {"freeze": layers} for layers in LAYERS}
CLASSIFIER_ALONE = f"--freeze {LAYERS[-1]}"


def main() -> None:
    arguments = read_options(Options)
    measure_all(arguments, f"{arguments.model}_fp16_b{arguments.batch}_frozen_1gpu", FROZEN, CLASSIFIER_ALONE,
                "our whole step")


if __name__ == "__main__":
    run(main)

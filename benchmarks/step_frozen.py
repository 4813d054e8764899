"""The step with the first layers frozen against the whole step, alternating in one process on one GPU.

    python benchmarks/step_frozen.py

Measures like step_ingredients.py: the steps of `python -m train` on synthetic data, of the preset resnet50_90ep, with
and without `--freeze`. Writes results/<model>_fp16_b<batch>_frozen_1gpu.json: the step that trains only the classifier,
with the whole step as its peer. The .jsonl file of that name has a line for each choice of frozen layers, with both
sides' step times. The same command resumes.
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

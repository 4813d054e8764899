"""Options of a training step."""

from __future__ import annotations

from dataclasses import dataclass, field

from graph_passes.errors import GraphError
from graph_passes.executors.cuda.kernel_library import C_TYPES
from graph_passes.executors.cuda.optimizer import OptimizerConfig
from graph_passes.executors.cuda.statistics_group import StatisticsGroup
from graph_passes.graph import Ref


@dataclass(frozen=True)
class StepOptions:
    """The options of `TrainingStep` and `CudaExecutor`. Raises GraphError for another dtype.

    dtype type of tensors and weights: float16, bfloat16 or float32 optimizer constants of the optimizer tf32 fp32
    convolutions may round their inputs to TF32 deterministic equal inputs give equal bits: no measured time decides
    which kernel runs num_buckets cut the backward pass into that many graphs (`buckets.cut`), so that the gradients of
    the last
                        layers are ready while the first ones are still being computed
    wire_dtype          "float32": hand gradients over in fp32, whatever their type is. Every update must then follow
                        `forward_backward` with `on_bucket`, or `hand_over`
    group               the GPUs that share BatchNorm's statistics in training, joined already; all of them
                        must run the same passes
    largest_image_size  height and width of the largest training images to come, if those of the first batch are
                        smaller: their memory is reserved at the start
    answer              the tensor (N, ...) at which inference ends, returned as (N, C) float32 instead of the
                        probabilities: for example the features that the classifier reads. None: the probabilities
    """

    dtype: str = "float16"
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    tf32: bool = True
    deterministic: bool = False
    num_buckets: int = 1
    wire_dtype: str | None = None
    group: StatisticsGroup | None = None
    largest_image_size: int = 0
    answer: Ref | None = None

    def __post_init__(self) -> None:
        if self.dtype not in C_TYPES:
            raise GraphError(f"the cuda executor has no dtype '{self.dtype}': choose one of {', '.join(C_TYPES)}")

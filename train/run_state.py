"""The state of a run: the state is equal in all processes, captured for a checkpoint, and restored from a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from graph_passes import optimizers
from graph_passes.executors import Executor
from pipelines import DataError, Loader
from train.checkpoint import Biased, Checkpoint, Progress
from train.config import Config
from train.errors import TrainError
from train.optimizer import make_optimizer
from train.processes.distributed import Workers
from train.statistics import InitialShares


class RunState:
    """Parameters, optimizer, statistics, progress, and the position in the training images."""

    def __init__(self, config: Config, workers: Workers, executor: Executor, train_loader: Loader) -> None:
        self.config = config
        self.stated = config  # the configuration that is written to the run's files
        self.workers, self.executor, self.train_loader = workers, executor, train_loader
        self.optimizer = make_optimizer(executor, config)
        self.shares = InitialShares(executor)
        self.progress = Progress()
        self.steps_per_epoch = math.ceil(train_loader.num_batches / config.accumulate)

    def share(self) -> None:
        """Copy rank 0's parameters and optimizer to all processes; a collective operation."""
        executor, broadcast = self.executor, self.workers.broadcast
        params, aux = executor.get_params()
        executor.set_params(broadcast(params, "params"), broadcast(aux, "aux"))
        for name, live in (*self.optimizer.state.items(), ("ema", self.optimizer.ema)):
            canonical = {key: executor.to_canonical(key, array) for key, array in live.items()}
            self._assign(live, broadcast(canonical, name))

    def _assign(self, live: Mapping[str, Any], values: Mapping[str, np.ndarray]) -> None:
        """Set arrays of the executor or the optimizer from canonical arrays."""
        for name, value in values.items():
            if name in live:  # tensors that are not in `live` are frozen
                live[name][:] = self.executor.from_canonical(name, value)

    def capture(self) -> Checkpoint:
        """The whole state as a checkpoint; a collective operation."""
        return self.request()()

    def request(self) -> Callable[[], Checkpoint]:
        """Copy the whole state; a collective operation. Returns a function, to be called once, that makes a checkpoint
        of the copies. Any thread may call it while training continues."""
        executor, optimizer = self.executor, self.optimizer
        executor.synchronize()
        # averaged, because each process has seen different images
        self.workers.all_reduce_on_host(executor.trained_statistics, "aux")
        live = optimizer.ema
        self.workers.all_reduce_on_host([live[name] for name in executor.aux if name in live], "ema aux")
        take_params, take_aux, take_ema = map(executor.request_copies, (executor.params, executor.aux, live))
        take_state = {slot: executor.request_copies(arrays) for slot, arrays in optimizer.state.items()}
        own, averaged = dict(self.shares.own), dict(self.shares.averaged) if live else {}
        rest: dict[str, Any] = {
            "scalars": dict(optimizer.scalars),
            "config": self.stated,
            "class_names": self.train_loader.class_names,
            "class_keys": [key for key, _ in self.train_loader.classes],
            "progress": replace(self.progress),
            "loader_states": self.workers.gather(self.train_loader.state()),
            "numpy_rng": np.random.get_state(legacy=False),
        }

        def make() -> Checkpoint:
            params, aux, ema = take_params(), take_aux(), take_ema()
            averages = {**params, **aux, **ema} if ema else {}  # frozen tensors have no average
            unbiased, biased = self.shares.divide_out(aux, own)
            unbiased_averages, biased_averages = self.shares.divide_out(averages, averaged)
            return Checkpoint(
                params=params,
                aux=aux | unbiased,
                state={slot: take() for slot, take in take_state.items()},
                ema=averages | unbiased_averages,
                biased=Biased(biased, biased_averages, own, averaged),
                **rest,
            )

        return make

    def restore(self, checkpoint: Checkpoint) -> list[str]:
        """Restore everything except the parameters, with which the executor was built. Returns remarks for the user on
        how the run resumes. Raises TrainError or DataError if the checkpoint does not fit this run."""
        if not checkpoint.loader_states:
            raise _incomplete(checkpoint, "no position in the training images")
        self._restore_loader(checkpoint)
        self._check_frozen(checkpoint)
        self._restore_optimizer(checkpoint)
        self._restore_statistics(checkpoint)
        try:
            np.random.set_state(checkpoint.numpy_rng)
        except (ValueError, LookupError, TypeError, OverflowError) as error:
            raise _incomplete(checkpoint, f"no state of NumPy's random numbers ({error})") from None
        self._restore_progress(checkpoint)
        return self._notes(checkpoint)

    def _restore_loader(self, checkpoint: Checkpoint) -> None:
        states = checkpoint.loader_states
        try:
            self.train_loader.restore(states[self.workers.rank % len(states)])
        except DataError as error:
            raise DataError(f"{checkpoint.named}: {error}") from None

    def _check_frozen(self, checkpoint: Checkpoint) -> None:
        if checkpoint.config.freeze == self.config.freeze:
            return
        then, now = (f"--freeze {each.freeze}" if each.freeze else "no --freeze"
                     for each in (checkpoint.config, self.config))
        raise TrainError(f"{checkpoint.named} belongs to a run with {then}, but this one has {now}: to train other "
                         "layers, begin a new run from its weights (--weights)", on_all_ranks=True)

    def _restore_optimizer(self, checkpoint: Checkpoint) -> None:
        before, state = checkpoint.config, self.optimizer.state
        if checkpoint.state.keys() != state.keys():
            if before.optimizer == self.config.optimizer:
                raise _incomplete(checkpoint, f"no state of its optimizer, which has {', '.join(state)}")
            raise TrainError(f"{checkpoint.named} belongs to a run with --optimizer {before.optimizer}, whose state "
                             f"{self.config.optimizer} cannot use: leave out --optimizer", on_all_ranks=True)
        # Momentum is a sum of steps scaled by their learning rates. If the global batch changes the rate, momentum is
        # scaled likewise (Goyal et al., arXiv:1706.02677, section 3).
        images, images_before = self._images(checkpoint)
        jump, rate_in = np.float32(images / images_before), optimizers.rule_of(self.config.optimizer).rate_in
        for slot, arrays in checkpoint.state.items():
            if missing := sorted(state[slot].keys() - arrays.keys()):
                raise _incomplete(checkpoint, f"no {slot} of {missing[0]}")
            scale = jump if slot in rate_in else np.float32(1)
            self._assign(state[slot], {name: array * scale for name, array in arrays.items()})
        self.optimizer.scalars = checkpoint.scalars

    def _restore_statistics(self, checkpoint: Checkpoint) -> None:
        """Restore BatchNorm's running statistics, with the share of their initial values, and the moving averages."""
        biased = checkpoint.biased
        self._assign(self.executor.aux, biased.aux)
        if self.optimizer.ema:
            self._assign(self.optimizer.ema, checkpoint.ema | biased.averages if checkpoint.ema else
                         checkpoint.params | checkpoint.aux | biased.aux)
        self.shares.restore(biased.aux_shares, biased.average_shares if checkpoint.ema else biased.aux_shares)

    def _restore_progress(self, checkpoint: Checkpoint) -> None:
        self.progress = replace(checkpoint.progress)
        if self.train_loader.epoch == self.progress.epoch:
            self.progress.epoch_step = math.ceil(self.train_loader.batch / self.config.accumulate)
        elif self.train_loader.epoch > self.progress.epoch:  # the checkpoint was saved in validation
            self.progress.epoch_step = self.steps_per_epoch

    def _notes(self, checkpoint: Checkpoint) -> list[str]:
        """Remarks for the user on how the run resumes."""
        notes: list[str] = []
        images, images_before = self._images(checkpoint)
        if images != images_before:
            processes = "1 process" if self.workers.size == 1 else f"{self.workers.size} processes"
            notes.append(f"resuming with {images} images a step ({processes}), before {images_before} "
                         f"({len(checkpoint.loader_states)}): the learning rate is scaled in proportion")
        if checkpoint.is_at_limit and not self.config.max_steps:
            notes.append(f"--max-steps {checkpoint.config.max_steps} has been reached and is dropped: the run "
                         "continues to the end of its epochs")
        return notes

    def _images(self, checkpoint: Checkpoint) -> tuple[int, int]:
        """Images per step, now and at the checkpoint."""
        return (self.config.global_batch(self.workers.size),
                checkpoint.config.global_batch(len(checkpoint.loader_states)))


def _incomplete(checkpoint: Checkpoint, fault: str) -> TrainError:
    return TrainError(f"{checkpoint.named} cannot be resumed, since it holds {fault}: use another checkpoint in its "
                      "folder",
                      on_all_ranks=True)

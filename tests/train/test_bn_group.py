"""`--bn-group`: which processes share BatchNorm statistics, and the messages if none can."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from graph_passes.executors.cuda import statistics_group
from train import TrainError, build
from train.config import Config
from train.devices import Placement

CUDA = Placement("cuda", "gpu(0)", "")


def workers(rank, local_rank, local_size):
    """Workers on machines with `local_size` processes each; a process's invitation is its rank."""
    size = (rank // local_size + 1) * local_size
    return SimpleNamespace(rank=rank, local_rank=local_rank, local_size=local_size,
                           agreement=contextlib.nullcontext, gather=lambda invitation: list(range(size)))


@pytest.mark.parametrize("rank, local_rank, local_size, group, members", [
    (0, 0, 4, 2, [0, 1]), (3, 3, 4, 2, [2, 3]), (13, 5, 8, 4, [12, 13, 14, 15]), (5, 2, 3, 3, [3, 4, 5]),
])
def test_members_are_neighbours_on_a_machine(monkeypatch, rank, local_rank, local_size, group, members):
    class FakeGroup:
        def __init__(self, device_id):
            assert device_id == local_rank
            self.invitation = rank

        def join(self, invitations, own):
            assert invitations == members
            assert invitations[own] == rank
            self.joined = True

    monkeypatch.setattr(statistics_group, "StatisticsGroup", FakeGroup)
    assert build.join_bn_group(Config(bn_group=group), CUDA, workers(rank, local_rank, local_size)).joined


@pytest.mark.parametrize("local_size, group, elastic, sentence", [
    (3, 2, "", "--bn-group 2 does not divide the number of processes on this machine, 3: give a divisor of this"),
    (1, 2, "", "--bn-group 2 does not divide the number of processes on this machine, 1: give a divisor of this"),
    (2, 4, "", "--bn-group 4 does not divide the number of processes on this machine, 2: give a divisor of this"),
    (4, 2, "1", "--bn-group 2 does not work in elastic runs, because a lost process would break its group"),
])
def test_refusals(monkeypatch, local_size, group, elastic, sentence):
    monkeypatch.setenv("HOROVOD_ELASTIC", elastic)
    with pytest.raises(TrainError) as error:
        build.join_bn_group(Config(bn_group=group), CUDA, workers(0, 0, local_size))
    assert str(error.value).startswith(sentence)


def test_no_group_is_the_default():
    assert build.join_bn_group(Config(), CUDA, workers(0, 0, 4)) is None

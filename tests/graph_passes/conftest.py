"""Networks for the tests of the passes. This file also lets the tests in cuda/ import this folder's modules."""

from __future__ import annotations

import pytest

from common.mxnet_compat import mx
from train.models import resnet


@pytest.fixture
def narrow_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our ResNets and those of MXNet's zoo, an eighth as wide, for tests that compute with them: they have the same
    operators and a sixtieth of the weights."""
    monkeypatch.setattr(resnet, "FIRST_WIDTH", 8)
    sizes = mx.gluon.model_zoo.vision.resnet.resnet_spec
    for depth, (kind, layers, channels) in list(sizes.items()):
        monkeypatch.setitem(sizes, depth, (kind, layers, [count // 8 for count in channels]))

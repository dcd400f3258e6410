"""MassGap of networks with heads: what each kind of group leaves to gain."""

import pytest
import torch
from runs import Attention, Plain, built, fit
from torch import nn

from lightning_bnn.callbacks import MassGap
from weightsym import discover, min_mass
from weightsym import params as P


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])  # with units to scale, and without
def test_excess_by_kind_of_group(activation):
    module, gap = built(Plain), MassGap(3)
    module.net = nn.Sequential(Attention(), nn.Linear(3, 5), activation(), nn.Linear(5, 3))
    trainer = fit(module, gap, max_epochs=1)
    sym, params = discover(module.net.eval(), torch.randn(2, 6)), P.of(module.net)
    expected = [min_mass(params, sym, mixing=m).excess.item() for m in (False, "only", True)]
    names = ("mass_excess", "mass_excess/heads", "mass_excess/joint")
    found = [trainer.callback_metrics[n].item() for n in names]
    assert found == pytest.approx(expected, rel=1e-3)
    assert expected[2] >= expected[1] > 0
    assert [len(row) for _, row in gap.history] == [5] * 2

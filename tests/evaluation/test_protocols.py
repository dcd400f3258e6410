"""What is removed before posteriors are compared."""

import math

import pytest
import torch
from torchvision.models.resnet import BasicBlock

from lightning_bnn.evaluation.protocols import PROTOCOLS, before_norm, inner_symmetries
from lightning_bnn.models import mlp, optunet, resnet18
from weightsym import discover
from weightsym import params as P


def removed(remover, networks):
    plan = remover(networks)
    return {name: plan(name, t, slice(None)) for name, t in networks.items()}


@pytest.mark.e2e
def test_p1_leaves_residual_streams_and_counts_as_the_paper_s_code():
    net = resnet18().eval()
    sym = PROTOCOLS["p1"].remover(net, torch.randn(2, 3, 8, 8)).symmetries
    assert sym.log10_permutations == pytest.approx(3956.3, abs=0.1)
    assert len(sym.scalings) == 8
    touched = {sym.axes[p.axis].tensor for g in sym.permutations for p in g.placements}
    assert "conv1.weight" not in touched
    assert "layer1.0.conv1.weight" in touched


@pytest.mark.parametrize(("protocol", "orders"), [("p1", 1), ("full", 2)])
def test_p1_sorts_optunet_inside_its_groups_only(protocol, orders):
    removal = PROTOCOLS[protocol].remover(optunet(), torch.randn(2, 1, 28, 28))
    wanted = math.log10(orders * math.factorial(5) ** 2)
    assert removal.symmetries.log10_permutations == pytest.approx(wanted)


def by_hand(net):
    """P1's released procedure for a perceptron: unit norms layer by layer, then sort by the first
    weight, descending; biases are scaled, not counted."""
    w = [net[k].weight.detach().clone() for k in (1, 3, 5)]
    b = [net[k].bias.detach().clone() for k in (1, 3, 5)]
    norms = torch.ones(4)
    for k in range(3):
        w[k] = w[k] * norms[None]
        if k < 2:
            norms = w[k].norm(dim=1)
            w[k], b[k] = w[k] / norms[:, None], b[k] / norms
    for k in range(2):
        order = w[k][:, 0].argsort(descending=True)
        w[k], b[k], w[k + 1] = w[k][order], b[k][order], w[k + 1][:, order]
    return w, b


def test_p1_equals_its_procedure_written_out():
    net = mlp(4, [5, 6], 3)
    found = removed(PROTOCOLS["p1"].remover(net, torch.randn(2, 4)), P.stack([P.of(net)]))
    weights, biases = by_hand(net)
    for k, w, b in zip((1, 3, 5), weights, biases, strict=True):
        torch.testing.assert_close(found[f"{k}.weight"][0], w)
        torch.testing.assert_close(found[f"{k}.bias"][0], b)


def test_signs_are_left_by_p1_and_removed_by_default():
    net = mlp(4, [5], 3, torch.nn.Tanh)
    sym = discover(net, torch.randn(2, 4))
    assert sym.sign_dof == 5
    assert inner_symmetries(sym).sign_dof == 0


def test_p1_frees_what_enters_a_batch_norm():
    net = torch.nn.Sequential(
        torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.ReLU(), torch.nn.Linear(5, 3)
    ).eval()
    stack = P.populate(net, 3)
    stack["1.weight"] = -0.5 - torch.rand(3, 5)
    found = removed(PROTOCOLS["p1"].remover(net, torch.randn(2, 4)), stack)
    torch.testing.assert_close(found["0.weight"].norm(dim=2), torch.ones(3, 5))
    torch.testing.assert_close(found["1.weight"], -torch.ones(3, 5))
    held = removed(PROTOCOLS["full"].remover(net, torch.randn(2, 4)), stack)
    assert not torch.allclose(held["0.weight"].norm(dim=2), torch.ones(3, 5))
    block = torch.nn.Sequential(
        torch.nn.Conv2d(2, 3, 1), torch.nn.BatchNorm2d(3), torch.nn.ReLU(), BasicBlock(3, 3),
        torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, 2),
    ).eval()  # fmt: skip
    sym = discover(block, torch.randn(2, 2, 4, 4))
    assert before_norm(sym) == {"0.weight", "3.conv1.weight", "3.conv2.weight"}

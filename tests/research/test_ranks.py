"""Simulation-based calibration: a right sampler passes, one of another temperature does not."""

import lightning as L
import pytest
import torch
from shell import failure
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bnn_research.cli import main
from bnn_research.references.ranks import ranks_of, simulated, uniformity
from lightning_bnn.evaluation.problem import Problem
from lightning_bnn.likelihoods import Categorical, Gaussian

DRAWS = 7


class Line(L.LightningDataModule):
    def train_dataloader(self):
        x = torch.linspace(-1, 1, 12)[:, None]
        return DataLoader(TensorDataset(x, x), batch_size=5)


def ranks(temperature):
    sampler = {"step_size": 0.2, "leapfrog_steps": 8, "adapt_steps": 30, "temperature": temperature}
    model = {"prior_std": 1.5, "burn_in": 40, "optimizer": {"init_args": sampler}}
    settings = {"model": {"init_args": model}, "trainer": {"max_epochs": 110}}
    problem = Problem(nn.Linear(1, 1), Line(), Gaussian(std=0.5))
    return ranks_of(problem, settings, 200, DRAWS, 0)


def test_ranks_of_a_right_sampler_are_uniform_and_of_a_wrong_one_are_not():
    right, wrong = ranks(1.0), ranks(6.0)
    assert len(right) == 6
    assert min(uniformity(r, DRAWS) for r in right.values()) > 0.01 / len(right)
    assert min(uniformity(r, DRAWS) for r in wrong.values()) < 1e-6


def test_simulated_targets_have_the_law_of_the_likelihood():
    generator = torch.Generator().manual_seed(0)
    outputs = torch.tensor([[[1.0], [-2.0]]]).expand(20_000, 2, 1)
    drawn = simulated(outputs, Gaussian(std=0.3), generator)[..., 0]
    torch.testing.assert_close(drawn.mean(0), torch.tensor([1.0, -2.0]), atol=0.02, rtol=0)
    torch.testing.assert_close(drawn.std(0), torch.full((2,), 0.3), atol=0.01, rtol=0)
    logits = torch.tensor([[[0.0, 1.0, -1.0]]]).expand(20_000, 1, 3)
    classes = simulated(logits, Categorical(), generator).flatten()
    shares = torch.bincount(classes) / len(classes)
    torch.testing.assert_close(shares, logits[0, 0].softmax(0), atol=0.02, rtol=0)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["yatch"], "`name` must be one of"),
        (["sine", "--replicates", "3"], "`replicates` must be at least 10"),
        (["sine", "--transitions", "160"], "`transitions` must be at least 175"),
    ],
)
def test_mistakes_are_refused(args, sentence, capsys, tmp_path):
    line = ["sbc", *args, "--out", str(tmp_path / "out")]
    assert sentence in failure(capsys, *line, script=main)

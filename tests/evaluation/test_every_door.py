"""One posterior has one NLL, whichever door it is asked at."""

import math

import lightning as L
import numpy as np
import pytest
import torch
from runs import QUIET
from torch.utils.data import DataLoader, TensorDataset

import lightning_bnn
from lightning_bnn.calibration.calibrated import split_rows
from lightning_bnn.doctor import Evidence, Examples
from lightning_bnn.evaluation import Evaluator, Predictions, numbers_of
from lightning_bnn.likelihoods import Bernoulli, Categorical, Gaussian
from lightning_bnn.models import mlp
from lightning_bnn.modules import DeepEnsemble
from lightning_bnn.posteriors import Empirical, Posterior
from lightning_bnn.sklearn import BnnRegressor
from weightsym import params as P

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("undrawn")]
G = torch.Generator().manual_seed(0)
X, Y = torch.randn(60, 4, generator=G), torch.randn(60, 2, generator=G)
LABELS = torch.randint(3, (60,), generator=G)


CASES = {
    "classes": (Categorical(), 3, LABELS),
    "one logit": (Bernoulli(), 1, LABELS.clamp(max=1)),
    "one target": (Gaussian(std=0.7), 1, Y[:, :1]),
    "two targets": (Gaussian("heteroscedastic"), 4, Y),
}


class Data(L.LightningDataModule):
    def __init__(self, y):
        super().__init__()
        self.y = y

    def test_dataloader(self):
        return DataLoader(TensorDataset(X, self.y), 25)

    val_dataloader = test_dataloader


@pytest.mark.parametrize("name", CASES)
def test_one_posterior_has_one_nll(name):
    likelihood, width, y = CASES[name]
    net = mlp(4, [5], width).eval()
    four = P.populate(net, 4, torch.Generator().manual_seed(1))
    module = DeepEnsemble(net, members=4, likelihood=likelihood)
    module.load_state_dict({f"state.networks.{n}": t for n, t in four.items()}, strict=False)
    outputs = P.apply(net, four, X).detach()
    logs = likelihood.log_prob(outputs, y).detach().double()
    wanted = float(math.log(4) - logs.logsumexp(0).mean())

    predictions, evaluator = Predictions.of(likelihood, outputs, y), Evaluator(likelihood)
    for rows in torch.arange(60).split(25):
        evaluator.add(outputs[:, rows], y[rows])
    modes = [Empirical({n: t[k : k + 1] for n, t in four.items()}) for k in range(4)]
    evidence = Evidence(net, likelihood, modes, modes, held_out=Examples((X,), y))
    beside = P.populate(net, 5, torch.Generator().manual_seed(2))
    compared = lightning_bnn.compare(
        beside, {"A": Posterior.of(four, net, draws=True)}, Data(y), network=net,
        likelihood=likelihood,
    ).tables["predictions"]  # fmt: skip
    (row,) = compared.rows
    trainer = L.Trainer(**QUIET)
    doors = {
        "predictions": predictions.numbers("nll")["nll"],
        "tables": numbers_of([predictions])()["nll"],
        "modes": float(predictions.stacked(
            [Predictions.of(likelihood, o[None], y) for o in outputs]
        ).mean().numbers("nll")["nll"]),
        "evaluator": float(evaluator.values()["nll"]),
        "test": trainer.test(module, Data(y), verbose=False)[0]["test/nll"],
        "validation": trainer.validate(module, Data(y), verbose=False)[0]["val/nll"],
        "doctor": -float(evidence.log_density(evidence.on_held_out, y).mean()),
        "comparison": row[list(compared.header).index("NLL")].value,
    }  # fmt: skip
    assert doors == pytest.approx(dict.fromkeys(doors, wanted), rel=1e-5)
    assert float(-logs.mean()) > wanted + 1e-3  # the control: networks one by one

    _, apart = split_rows(60, 0.5, module.seed)
    found = module.calibrate(Data(y))
    assert found.before["nll"] == pytest.approx(predictions.rows(apart).numbers("nll")["nll"])


def test_an_estimator_has_the_nll_of_its_module():
    x, y = X.double().numpy(), 10 + 3 * Y.double().numpy()
    regressor = BnnRegressor(hidden=(4,), epochs=2, random_state=0).fit(x, y)
    scaled = [torch.from_numpy((t - t.mean(0)) / t.std(0)) for t in (x, y)]
    module = regressor.module_
    outputs = module.outputs((scaled[0],)).detach()
    known = Predictions.of(module.likelihood, outputs, scaled[1]).numbers("nll")["nll"]
    found = -regressor.log_prob(x, y).mean() - np.log(y.std(0)).sum()
    assert found == pytest.approx(known, rel=1e-5)

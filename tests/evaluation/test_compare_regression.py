"""`lightning-bnn compare` and `collapse` on a regression, from networks on disk to tables."""

import pytest
import torch
import yaml
from small_runs import numbers, results

from lightning_bnn import metrics as M
from lightning_bnn.bank import CheckpointBank
from lightning_bnn.cli import main
from lightning_bnn.datamodules import Diabetes
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.models import mlp
from weightsym import params as P

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("undrawn")]

NET = mlp(10, [3], 2).eval()
CONFIG = {
    "model": {
        "class_path": "DeepEnsemble",
        "init_args": {
            "network": {
                "class_path": "lightning_bnn.models.mlp",
                "init_args": {"inputs": 10, "hidden": [3], "outputs": 2},
            },
            "likelihood": {
                "class_path": "lightning_bnn.likelihoods.Gaussian",
                "init_args": {"noise": "heteroscedastic"},
            },
        },
    },
    "data": {"class_path": "Diabetes"},
}


def bank(path, count, seed):
    networks = P.populate(NET, count, torch.Generator().manual_seed(seed))
    with CheckpointBank(path) as held:
        held.extend(networks)
    return networks


@pytest.mark.e2e
def test_numbers_of_an_ensemble_are_those_computed_by_hand(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "like.yaml").write_text(yaml.safe_dump(CONFIG))
    reference, ensemble = bank("ref", 6, 1), bank("ens", 4, 2)
    main(["compare", "--data", "like.yaml", "ref", "--posteriors.E", "ens"])
    (row,) = (r for r in numbers("studies/compare", "predictions") if r["mode"] == "Multi mode")
    data = Diabetes()
    x, y = data.load().test
    (m, s), (n, t) = (
        Gaussian("heteroscedastic").moments(P.apply(NET, stack, x).detach().double())
        for stack in (ensemble, reference)
    )
    rmse = (m.mean(0) - y).square().mean().sqrt()
    wanted = {
        "RMSE": rmse, "RMSE (unit)": rmse * data.target_std[0], "CRPS": M.crps(m, s, y),
        "NLL": M.mixture_nll(m, s, y).mean(), "Cover90": 100 * M.interval_coverage(m, s, y),
        "Width90": M.interval_width(m, s), "Calib": 100 * M.quantile_calibration(m, s, y),
        "Sharpness": M.sharpness(m, s), "Energy": M.energy_distance(m, s, n, t),
        "Energy (f)": M.energy_distance(m, 0 * s, n, 0 * t),
    }  # fmt: skip
    (distances,) = (r for r in numbers("studies/compare", "distances") if r["method"] == "E")
    row |= distances
    for name, value in wanted.items():
        assert row[name] == pytest.approx(float(value), rel=1e-5), name
    assert "Acc" not in row
    assert (
        "a perfect forecaster has 3.1"
        in results("studies/compare")["tables"]["predictions"]["note"]
    )

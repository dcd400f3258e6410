"""The judge is judged: by draws of the posterior, by what looks like them, by what it refuses."""

import math
import shutil

import pytest
import torch
from small_runs import numbers, results

from lightning_bnn.bank import CheckpointBank
from lightning_bnn.cli import main
from lightning_bnn.commands.presets import preset_text
from lightning_bnn.references import read_reference
from lightning_bnn.references.shipped import reference_folder
from lightning_bnn.studies.fidelity import HALVES

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.e2e]


def fill(path, chains, change=lambda networks, chain: networks):
    """A bank of forty networks of each chain."""
    with CheckpointBank(path) as bank:
        for chain, mode in enumerate(chains):
            networks = change({n: t[:40].clone() for n, t in mode.networks.items()}, chain)
            bank.extend(networks, [{"member": chain, "step": k} for k in range(40)])
    return str(path)


def shrunken(networks, chain):
    return {name: 0.7 * tensor for name, tensor in networks.items()}


def first_elsewhere(networks, chain):
    if chain == 0:
        list(networks.values())[-1].add_(torch.tensor([3.0, -3.0]))
    return networks


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Chains of a posterior in two halves: one is the reference, one what is scored."""
    folder = tmp_path_factory.mktemp("fidelity")
    modes = read_reference("two_gaussians")[0].modes
    found = {"chains": fill(folder / "chains", modes[4:])}
    found["shrunken"] = fill(folder / "shrunken", modes[4:], shrunken)
    for name, change in (("agree", lambda n, _: n), ("disagree", first_elsewhere)):
        found[name] = fill(folder / name / "bank", modes[:4], change)
        shutil.copy(reference_folder("two_gaussians") / "config.yaml", folder / name)
    return found


def fidelity(places, reference, out, *names):
    command = ["fidelity", places.get(reference, reference), "--samples", "40", "--out", str(out)]
    for name in names:
        command += [f"--posteriors.{name}", places[name]]
    main(command)
    return numbers(out, "fidelity"), results(out)


@pytest.fixture(scope="module")
def beside_agreeing(places, tmp_path_factory):
    return fidelity(places, "agree", tmp_path_factory.mktemp("out"), "shrunken", "chains")


def test_draws_of_the_posterior_itself_are_closest(beside_agreeing):
    rows, found = beside_agreeing
    assert [row["posterior"] for row in rows] == ["chains", "shrunken", HALVES]
    assert abs(rows[0]["NS law"]) < 0.3 < 2 < rows[1]["NS law"]
    assert rows[1]["function law"] - rows[0]["function law"] > 1
    assert not found["cautions"]
    assert "R-hat of its predictions: median" in found["tables"]["fidelity"]["note"]


def test_a_half_of_the_reference_says_what_cannot_be_told_from_it(beside_agreeing):
    """All that draws of the posterior have is of the size of what its own halves have."""
    (chains, other, half), found = beside_agreeing
    for column in ("function law", "NS law", "law"):
        assert abs(half[column]) < 1
        assert abs(chains[column]) < 1
    for column in ("TV", "KL"):
        assert 0 < half[column] < other[column] / 3
        assert chains[column] < other[column] / 3
    assert {"Agree", "NLL", "Acc", "ECE"} <= half.keys()
    assert half["gradients"] is half["seconds"] is None
    assert "TrainingCost" in found["tables"]["fidelity"]["note"]


def test_of_a_regression_calibration_stands_beside_distances(tmp_path):
    """With what a perfect forecaster has of so many test points."""
    stored = read_reference("sine")[0]
    known = {"sine": "sine", "other": fill(tmp_path / "other", stored.modes[:3], shrunken)}
    (other, half), found = fidelity(known, "sine", tmp_path / "out", "other")
    for column in ("Energy (f)", "Energy"):
        assert 0 < half[column] < other[column] / 2
    for column in ("RMSE", "NLL", "NLL (moments)", "CRPS", "Cover90", "Width90", "Calib"):
        assert math.isfinite(half[column])
        assert math.isfinite(other[column])
    assert "a perfect forecaster has" in found["tables"]["fidelity"]["note"]


def test_beside_chains_that_do_not_agree_nothing_is_ranked(places, tmp_path, capsys):
    rows, found = fidelity(places, "disagree", tmp_path, "shrunken", "chains")
    assert [row["posterior"] for row in rows] == ["shrunken", "chains", HALVES]
    (note,) = found["cautions"]
    assert note.endswith("/disagree/bank have not converged: distances to it rank nothing.")
    assert found["settings"]["reference_rhat"][1] > 1.05
    printed = capsys.readouterr().out
    assert note in printed
    assert "NOT CONVERGED" in printed


def test_networks_of_which_nobody_knows_whether_they_agree_rank_nothing(places, tmp_path):
    single = fill(tmp_path / "single" / "bank", read_reference("two_gaussians")[0].modes[:1])
    with CheckpointBank(single, "r") as bank:
        networks = bank[:]
    shutil.rmtree(single)
    with CheckpointBank(single) as bank:
        bank.extend(networks, [{"step": 1}] * 40)
    shutil.copy(reference_folder("two_gaussians") / "config.yaml", tmp_path / "single")
    known = {**places, "single": single}
    rows, found = fidelity(known, "single", tmp_path / "out", "shrunken", "chains")
    assert [row["posterior"] for row in rows] == ["shrunken", "chains"]
    assert found["cautions"][0].startswith("Nobody knows whether")


def test_what_is_of_another_posterior_is_named(places, tmp_path):
    """Other data, another prior, another likelihood; the same with another method is the same."""
    runs = {}
    for name, old, new in (
        ("same", "burn_in: 200", "burn_in: 100"),
        ("prior", "prior_std: 1.0", "prior_std: 0.5"),
        ("data", "size: 30", "size: 20"),
        ("noise", "prior_std: 1.0", "prior_std: 1.0\n    likelihood: {class_path: Bernoulli}"),
    ):
        text = preset_text("reference_two_gaussians")
        assert old in text
        shutil.copytree(places["shrunken"], tmp_path / name / "bank")
        (tmp_path / name / "config.yaml").write_text(text.replace(old, new))
        runs[name] = str(tmp_path / name / "bank")
    _, found = fidelity({**places, **runs}, "agree", tmp_path / "out", *runs)
    assert found["cautions"] == [
        "prior has `prior_std` 0.5, the reference 1.0: it is of another posterior.",
        "data has `data` TwoGaussians(size=20), the reference TwoGaussians(size=30): it is of "
        "another posterior. It may have seen examples that it is judged by.",
        "noise has `likelihood` Bernoulli, the reference Categorical: it is of another posterior.",
    ]

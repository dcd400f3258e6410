"""The judge is judged: by draws of the posterior, by what looks like them, by what it refuses."""

import math
import shutil

import pytest
import torch
from small_runs import numbers, results

from lightning_bnn.bank import CheckpointBank
from lightning_bnn.cli import main
from lightning_bnn.commands.fidelity import HALVES
from lightning_bnn.references import read_reference
from lightning_bnn.references.shipped import reference_folder

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
    for name, change in (("agree", lambda n, _: n), ("disagree", first_elsewhere)):
        found[name] = fill(folder / name / "bank", modes[:4], change)
        shutil.copy(reference_folder("two_gaussians") / "config.yaml", folder / name)
    text = (reference_folder("two_gaussians") / "config.yaml").read_text()
    for name, old, new in (
        ("shrunken", "burn_in: 200", "burn_in: 100"),  # is no other posterior
        ("prior", "prior_std: 1.0", "prior_std: 0.5"),
        ("data", "size: 30", "size: 20"),
    ):
        assert old in text
        found[name] = fill(folder / name / "bank", modes[4:], shrunken)
        (folder / name / "config.yaml").write_text(text.replace(old, new))
    return found


def fidelity(places, reference, out, *names):
    command = ["fidelity", places.get(reference, reference), "--samples", "40", "--out", str(out)]
    for name in names:
        command += [f"--posteriors.{name}", places[name]]
    main(command)
    return numbers(out, "fidelity"), results(out)


def test_draws_of_the_posterior_itself_are_closest(places, tmp_path):
    """And have of a half of the reference what that has of the other."""
    rows, found = fidelity(places, "agree", tmp_path, "shrunken", "chains", "prior", "data")
    chains, other, *_, half = rows
    names = [row["posterior"] for row in rows]
    assert (names[0], names[-1]) == ("chains", HALVES)
    assert abs(chains["NS law"]) < 0.3 < 2 < other["NS law"]
    assert other["function law"] - chains["function law"] > 1
    for column in ("function law", "NS law", "law"):
        assert abs(half[column]) < 1
        assert abs(chains[column]) < 1
    for column in ("TV", "KL"):
        assert 0 < half[column] < other[column] / 3
        assert chains[column] < other[column] / 3
    assert {"Agree", "NLL", "Acc", "ECE"} <= half.keys()
    assert half["gradients"] is half["seconds"] is None
    assert found["cautions"] == [
        "prior has `prior_std` 0.5, the reference 1.0: it belongs to another posterior.",
        "data has `data` TwoGaussians(size=20), the reference TwoGaussians(size=30): it "
        "belongs to another posterior. It may have seen examples that it is judged by.",
    ]
    note = found["tables"]["fidelity"]["note"]
    assert "R-hat of its predictions: median" in note
    assert "TrainingCost" in note


def test_of_a_regression_calibration_stands_beside_distances(tmp_path):
    """With what a perfect forecaster has of so many test points."""
    modes = read_reference("sine")[0].modes[:3]
    known = {"sine": "sine", "other": fill(tmp_path / "other", modes, shrunken)}
    (other, half), found = fidelity(known, "sine", tmp_path / "out", "other")
    for column in ("Energy (f)", "Energy"):
        assert 0 < half[column] < other[column] / 2
    for column in ("RMSE", "NLL", "NLL (moments)", "CRPS", "Cover90", "Width90", "Calib"):
        assert math.isfinite(half[column] + other[column])
    assert "a perfect forecaster has" in found["tables"]["fidelity"]["note"]


def test_beside_chains_that_do_not_agree_nothing_is_ranked(places, tmp_path, capsys):
    rows, found = fidelity(places, "disagree", tmp_path, "shrunken", "chains")
    assert [row["posterior"] for row in rows] == ["shrunken", "chains", HALVES]
    (note,) = found["cautions"]
    assert note.endswith("/disagree/bank have not converged: distances to it are not ranked.")
    assert found["settings"]["reference_rhat"][1] > 1.05
    printed = capsys.readouterr().out
    assert note in printed
    assert "NOT CONVERGED" in printed


def test_networks_of_which_nobody_knows_whether_they_agree_rank_nothing(places, tmp_path):
    (tmp_path / "single").mkdir()
    with CheckpointBank(tmp_path / "single" / "bank") as bank:
        networks = read_reference("two_gaussians")[0].modes[0].networks
        bank.extend({n: t[:40] for n, t in networks.items()}, [{"step": 1}] * 40)
    shutil.copy(reference_folder("two_gaussians") / "config.yaml", tmp_path / "single")
    known = {**places, "single": str(tmp_path / "single" / "bank")}
    rows, found = fidelity(known, "single", tmp_path / "out", "shrunken", "chains")
    assert [row["posterior"] for row in rows] == ["shrunken", "chains"]
    assert found["cautions"][0].startswith("It is unknown whether")

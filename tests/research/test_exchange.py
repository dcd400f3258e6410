"""References in the formats of others: what their readers find is what there is."""

import json
import zipfile

import numpy as np
import pytest
import torch

from bnn_research.cli import main
from bnn_research.references import export_posteriordb, read_competition
from lightning_bnn.metrics import agreement, total_variation
from lightning_bnn.references import read_reference


def read(path):
    """As the packages of posteriordb do: an archive has one file, of the name without .zip."""
    if path.suffix != ".zip":
        return json.loads(path.read_text())
    with zipfile.ZipFile(path) as archive:
        assert archive.namelist() == [path.stem]
        return json.loads(archive.read(path.stem))


def test_a_reference_for_posteriordb(tmp_path):
    files = export_posteriordb("two_gaussians", tmp_path)
    posterior = read(tmp_path / "posteriors" / "two_gaussians-two_gaussians_network.json")
    assert sorted(files) == sorted(path for path in tmp_path.rglob("*") if path.is_file())
    full, stored = posterior["reference_posterior_name"], read_reference("two_gaussians")[0]
    draws = read(tmp_path / "reference_posteriors" / "draws" / "draws" / f"{full}.json.zip")
    info = read(tmp_path / "reference_posteriors" / "draws" / "info" / f"{full}.info.json")
    networks = stored.networks()
    assert len(draws) == 8
    assert posterior["dimensions"] == {n: t[0].numel() for n, t in networks.items()}
    names = list(posterior["dimensions"])
    assert len(draws[0]) == sum(posterior["dimensions"].values())
    weight = networks[names[0]].view(8, 250, 10, 2)
    assert draws[3][f"{names[0]}[7,2]"] == weight[3, :, 6, 1].double().tolist()
    assert draws[3][f"{names[0]}[7,1]"] != weight[3, :, 6, 1].double().tolist()
    assert draws[7][f"{names[1]}[10]"] == networks[names[1]].view(8, 250, 10)[7, :, 9].tolist()
    found = info["diagnostics"]
    assert (found["ndraws"], found["nchains"]) == (2000, 8)
    assert found["diagnostic_information"]["names"] == list(draws[0])
    card = read_reference("two_gaussians")[2].diagnosis.spaces["weights"]
    assert max(found["r_hat"]) == pytest.approx(card["rhat_max"], abs=1e-6)
    assert min(found["effective_sample_size_bulk"]) == pytest.approx(card["ess_min"], rel=1e-3)
    assert info["checks_made"] == {
        "ndraws_is_10k": False, "nchains_is_gte_4": True, "r_hat_below_1_01": True,
    }  # fmt: skip
    data_info = read(tmp_path / "data" / "info" / f"{posterior['data_name']}.info.json")
    data = read(tmp_path / f"{data_info['data_file']}.zip")
    assert (data["N"], len(data["x"]), len(data["x"][0]), set(data["y"])) == (60, 60, 2, {0, 1})
    model = read(tmp_path / "models" / "info" / f"{posterior['model_name']}.info.json")
    code = tmp_path / model["model_implementations"]["lightning_bnn"]["model_code"]
    assert read(code)["model"]["init_args"]["prior_std"] == 1.0


def test_the_command_writes_the_same_files(tmp_path, capsys):
    main(["posteriordb", "two_gaussians", str(tmp_path / "a")])
    files = export_posteriordb("two_gaussians", tmp_path / "b")
    assert f"wrote {len(files)} files to {tmp_path / 'a'}" in capsys.readouterr().out
    for file in files:
        assert read(tmp_path / "a" / file.relative_to(tmp_path / "b")) == read(file)


def test_predictions_of_the_competition(tmp_path):
    probs = torch.distributions.Dirichlet(torch.ones(10)).sample((50,)).double()
    np.savetxt(tmp_path / "probs.csv", probs.numpy(), delimiter=",")
    found = read_competition(tmp_path / "probs.csv")
    assert torch.equal(found, probs)
    other = probs.roll(1, 0)
    a, b = other.numpy(), found.numpy()  # the two metrics of its kit
    assert float(agreement(other, found)) == (a.argmax(-1) == b.argmax(-1)).mean()
    distance = np.abs(a - b).sum(-1).mean() / 2
    assert float(total_variation(other, found)) == pytest.approx(distance)
    assert distance > 0.1


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.5,0.5\n0.5,0.4\n", "1 of 2 rows are not"),
        ("0.5,0.5\n1.5,-0.5\n", "1 of 2 rows are not"),
        ("0.5,0.5\nnan,1\n", "1 of 2 rows are not"),
        ("1\n1\n", "must have a column for each class, but has one"),
        ("a,b\n", "is not a table of numbers"),
        ("0.5,0.5\n1\n", "is not a table of numbers"),
    ],
)
def test_other_files_are_refused(text, message, tmp_path):
    (tmp_path / "probs.csv").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_competition(tmp_path / "probs.csv")
    assert "\n" not in str(caught.value)

"""What the docs show can be pasted, page by page; what they name is there."""

import re
from pathlib import Path

import pytest
import torch
from pages import PAGES, ROOT, page, pasted

from lightning_bnn import datamodules, modules
from lightning_bnn import params as P
from lightning_bnn.cli import STUDIES
from lightning_bnn.commands.presets import preset_names

OOD = ("AUROC", "AUPR_out", "AUPR_in", "FPR95")


# ------------------------------------------------------------ what is there when a page was pasted
def readme_page(names, printed):
    assert names["probs"].shape == (5, 10)
    assert bool((names["unsure"] >= 0).all())
    assert P.stack_size(names["networks"]) == 100
    assert len(list(Path("bank").glob("*"))) > 1
    x = torch.zeros(2, 64)
    torch.testing.assert_close(names["again"](x), names["module"](x))


def tour_page(names, printed):
    kept = names["bank"]
    assert len(kept) == 3
    assert {"tau", "mass_excess"} <= set(kept.records[-1]["metrics"])
    assert names["networks"]["1.weight"].shape == (100, 32, 64)
    assert names["trainer"].callback_metrics["test/acc"] > 0.8
    assert names["moved"]["conv1.weight"].shape == (2, 64, 3, 7, 7)
    assert "permutations: 10^5934" in printed
    assert float(re.search(r"^\d\.\d+e-\d+$", printed, re.MULTILINE)[0]) < 1e-14
    assert "1.weight        2048" in printed
    assert "FPR95" in printed


def callbacks_page(names, printed):
    trainer, kept = names["trainer"], names["kept"]
    assert trainer.callback_metrics["tau"] <= 1
    assert trainer.callback_metrics["mass_excess"] > 0
    assert len(kept) == 3
    assert kept.records[-1]["step"] == 51
    assert len(names["bank"]) == 6
    assert trainer.log_dir in printed


def calibration_page(names, printed):
    assert "before" in printed
    assert names["sets"].shape == names["probs"].shape == (450, 10)
    assert torch.equal(names["again"].probs(names["images"]), names["probs"])
    assert bool((names["small"] <= names["sets"]).all())
    assert names["mask"].shape == (225, 10)
    assert bool((names["intervals"].width > 0).all())


def loggers_page(names, printed):
    columns = (Path(names["table"].log_dir) / "metrics.csv").read_text().partition("\n")[0]
    assert {"tau", "mass_excess"} <= set(columns.split(","))
    assert list(Path(names["board"].log_dir).glob("events.out.tfevents*"))


def metrics_page(names, printed):
    logged = names["trainer"].callback_metrics
    assert set(logged) == {"ece", "nll", *(f"{n}/{s}" for n in OOD for s in ("svhn", "textures"))}
    assert logged["AUROC/svhn"] > 0.5
    assert [source.rows for source in names["free"]] == [100, 30]
    assert "3.bias" in printed


def modules_page(names, printed):
    ensemble = names["ensemble"]
    assert ensemble.member_stack()["1.weight"].shape == (5, 32, 64)
    assert names["network"](torch.zeros(2, 64)).shape == (2, 10)
    assert P.stack_size(names["stack"]) == 10
    assert "torch.Size([450, 10]) torch.Size([20, 450, 10])" in printed
    assert P.stack_size(names["networks"]) == 4 * 10
    assert names["posterior"].posterior().sample(3)["1.weight"].shape == (3, 32, 64)
    assert names["trainer"].callback_metrics["test/acc"] > 0.8


def doctor_page(names, printed):
    assert "deviations_too_small" in names["doctor"].report.names()
    assert "FAULT  Standard deviations of weights are 0.0" in printed


def references_page(names, printed):
    assert names["card"].verdict == "gold"
    assert names["networks"]["1.weight"].shape == (2000, 10, 2)
    assert names["accuracy"] > 0.9
    assert "gold the posterior of a perceptron with ten units" in printed
    assert "rhat_max" in printed


def regression_page(names, printed):
    assert names["prediction"].mean.shape == (4, 1)
    assert bool((names["low"] < names["prediction"].mean).all())
    assert "rmse" in printed.lower()


def other_networks_page(names, printed):
    assert "block perm." in printed
    assert float(printed.strip().split()[-1]) < 1e-13


def scale_page(names, printed):
    module = names["module"]
    assert len(module.healthy()) == int((module.divergence.means <= 0.5).sum()) == 50
    assert "50 torch.Size([100, 32, 64])" in printed
    assert names["found"].pairs.shape == (100, 100)
    assert names["found"].accuracy.max() > 0.8


def studies_page(names, printed):
    zeros = torch.cat([t.flatten() for t in names["small"].values()]) == 0
    assert zeros.double().mean() == pytest.approx(0.5, abs=1e-3)
    assert torch.equal(names["mixed"].mean, names["matched"].mean)
    assert not torch.equal(names["plain"].mean, names["matched"].mean)


def symmetry_page(names, printed):
    assert "mylib.scaled_relu" in printed.partition("\n")[0]
    (group,) = names["symmetries"].permutations
    assert (group.units, names["symmetries"].scaling_dof) == (8, 8)
    assert float(printed.split()[-1]) < 1e-14


def alignment_page(names, printed):
    assert names["common"].spread[-1] < 0.8 * names["common"].spread[0]
    assert names["result"].method in ("ascent", "frank-wolfe")
    assert float(names["mean"]["1.weight"].norm()) > 0


CHECKS = {
    "README.md": readme_page,
    "docs/tour.md": tour_page,
    "docs/alignment.md": alignment_page,
    "docs/calibration.md": calibration_page,
    "docs/callbacks.md": callbacks_page,
    "docs/doctor.md": doctor_page,
    "docs/loggers.md": loggers_page,
    "docs/metrics.md": metrics_page,
    "docs/modules.md": modules_page,
    "docs/other_networks.md": other_networks_page,
    "docs/references.md": references_page,
    "docs/regression.md": regression_page,
    "docs/scale.md": scale_page,
    "docs/studies.md": studies_page,
    "docs/symmetry.md": symmetry_page,
}
NO_CODE = (
    "architecture",
    "benchmarks",
    "demo",
    "glossary",
    "gotchas",
    "limits",
    "peers",
    "p1",
    "p2",
    "p3",
)
NO_PYTHON = tuple(f"docs/{name}.md" for name in NO_CODE)


TRAINING = "README.md", "docs/tour.md", "docs/modules.md", "docs/scale.md"
"""Pages that take some seconds."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.e2e) if n in TRAINING else n for n in CHECKS]
)
def test_a_page_can_be_pasted(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = pasted(page(name), name)
    CHECKS[name](names, capsys.readouterr().out)


def test_every_page_is_pasted_or_has_no_python():
    assert sorted([*CHECKS, *NO_PYTHON]) == sorted(PAGES)
    for name in NO_PYTHON:
        with pytest.raises(ValueError, match="has no Python"):
            pasted(page(name), name)


# ------------------------------------------------------------ what pages name
def test_every_study_is_in_the_docs_with_its_papers():
    text, tour = page("docs/studies.md"), page("docs/tour.md")
    for name in STUDIES:
        assert f"`{name}`" in text or f"lightning-bnn {name}" in text
        assert f"`{name}`" in tour or f"lightning-bnn {name}" in tour
    claims = "".join(page(f"docs/p{k}.md") for k in (1, 2, 3))
    for name in STUDIES.keys() - {"demo", "calibrate"}:
        assert f"lightning-bnn {name}" in claims
    assert not re.search(r"[A-Z]+_SECTION", claims)
    for picture in re.findall(r"!\[[^\]]*\]\((\S+)\)", text + claims):
        assert (ROOT / "docs" / picture).is_file()


def test_what_the_docs_name_is_there():
    text = page("docs/modules.md")
    for name in set(modules.__all__) - {"Prediction", "Predictive"}:
        assert name in text
    for name in re.findall(r"^\| `(\w+)`", text, re.MULTILINE):
        known = hasattr(datamodules, name) or hasattr(modules, name)
        assert known or name in preset_names()
    assert "digits_symmetrized_vi" in preset_names()

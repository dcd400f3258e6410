"""The examples of the docs run as they stand."""

import re
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from runs import Plain, Points

from lightning_bnn import models
from lightning_bnn import params as P
from lightning_bnn.bank import CheckpointBank

NUMBERS = ("AUROC", "AUPR_out", "AUPR_in", "FPR95")
DOCS = Path(__file__).parents[1] / "docs"


def blocks(name):
    return re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)


MODULE, COMPARISON, REMOVAL = blocks("metrics.md")
CALLBACKS, BANK = blocks("callbacks.md")
MODULES, CHAINS = blocks("modules.md")
(COMPACT,) = blocks("studies.md")
POPULATION, STREAMED = blocks("scale.md")


@pytest.mark.filterwarnings("ignore")
def test_a_module_with_metrics(tmp_path):
    names = {}
    exec(MODULE, names)
    g = torch.Generator().manual_seed(0)

    def loader(scale):
        x, y = scale * torch.randn(40, 6, generator=g), torch.randint(3, (40,), generator=g)
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)

    logger = TensorBoardLogger(tmp_path)
    trainer = L.Trainer(
        accelerator="cpu", logger=logger, enable_progress_bar=False, enable_model_summary=False
    )
    module = names["Classifier"](torch.nn.Linear(6, 3))
    trainer.test(module, [loader(1), loader(0.2), loader(0.5)], verbose=False)
    assert set(trainer.callback_metrics) == {
        *("ece", "nll"),
        *(
            f"{n}/{s}"
            for n in ("AUROC", "AUPR_out", "AUPR_in", "FPR95")
            for s in ("svhn", "textures")
        ),
    }
    assert trainer.callback_metrics["AUROC/svhn"] > 0.5


def test_comparisons():
    net = models.mlp(4, [6], 3)
    names = {"net": net, "example": torch.randn(1, 4)}
    exec(COMPARISON + REMOVAL, names)
    assert names["free"][0].rows == 100


def test_callbacks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(CALLBACKS, names)
    trainer = names["trainer"]
    trainer.log_every_n_steps = 5
    trainer.fit(Plain(), torch.utils.data.DataLoader(Points(), 6))
    assert trainer.callback_metrics["tau"] <= 1
    assert len(CheckpointBank(f"{trainer.log_dir}/bank", "r")) == 3


def test_bank(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stack = P.populate(models.mlp(4, [6], 3), 5)
    stack = {f"0.{n.partition('.')[2]}" if n.startswith("1.") else n: t for n, t in stack.items()}
    names = {"network": P.unstack(stack)[0], "stack": stack}
    exec(BANK, names)
    assert len(names["bank"]) == 6


@pytest.mark.filterwarnings("ignore")
def test_modules(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(MODULES, names)
    assert names["network"](torch.zeros(2, 64)).shape == (2, 10)
    assert P.stack_size(names["stack"]) == 10
    assert "torch.Size([450, 10]) torch.Size([20, 450, 10])" in capsys.readouterr().out
    shorter = CHAINS.replace("max_epochs=100", "max_epochs=12").replace("burn_in=50", "burn_in=3")
    exec(shorter, names)
    assert P.stack_size(names["networks"]) == 4 * 9


@pytest.mark.filterwarnings("ignore")
def test_populations(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(POPULATION, names)
    options = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = L.Trainer(accelerator="cpu", max_epochs=20, enable_model_summary=False, **options)
    trainer.fit(names["module"], names["data"])
    losses = names["module"].divergence.means
    assert len(names["module"].healthy()) == int((losses <= 0.5).sum()) > 10
    with CheckpointBank("networks") as bank:
        bank.extend(names["module"].member_stack())
    names = {}
    exec(STREAMED, names)
    assert names["found"].pairs.shape == (100, 100)
    assert names["found"].accuracy.max() > 0.8


def test_compact_representations():
    names = {"loader": [(torch.randn(8, 64), None)]}
    exec(COMPACT, names)
    zeros = torch.cat([t.flatten() for t in names["small"].values()]) == 0
    assert zeros.double().mean() == pytest.approx(0.5, abs=1e-3)
    assert torch.equal(names["mixed"].mean, names["matched"].mean)


def test_every_study_is_in_the_docs_with_its_papers():
    from lightning_bnn.cli import STUDIES

    text = (DOCS / "studies.md").read_text()
    readme = (DOCS.parent / "README.md").read_text()
    for name in STUDIES:
        assert f"`{name}`" in text or f"lightning-bnn {name}" in text
        assert f"`{name}`" in readme or f"lightning-bnn {name}" in readme
    claims = "".join((DOCS / f"p{k}.md").read_text() for k in (1, 2, 3))
    for name in STUDIES.keys() - {"demo"}:
        assert f"lightning-bnn {name}" in claims
    assert not re.search(r"[A-Z]+_SECTION", claims)
    for picture in re.findall(r"!\[[^\]]*\]\((\S+)\)", text + claims):
        assert (DOCS / picture).is_file()


def test_what_the_docs_name_is_there():
    from lightning_bnn import datamodules, modules
    from lightning_bnn.commands.presets import preset_names

    text = (DOCS / "modules.md").read_text()
    for name in set(modules.__all__) - {"BayesianModule", "Prediction", "Predictive"}:
        assert name in text
    for name in re.findall(r"^\| `(\w+)`", text, re.MULTILINE):
        known = hasattr(datamodules, name) or hasattr(modules, name)
        assert known or name in preset_names()
    assert "digits_symmetrized_vi" in preset_names()

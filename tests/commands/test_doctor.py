"""`lightning-bnn doctor` as a user calls it: runs, banks, folders, and what is none of them."""

import json

import pytest
import torch
import yaml
from shell import code_of, failure
from small_runs import CONFIG, NET, bank, config

from lightning_bnn.bank import CheckpointBank
from lightning_bnn.cli import main
from lightning_bnn.commands.doctor import FAULTY
from lightning_bnn.doctor import Report
from weightsym import params as P

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("undrawn")]


def chains(path, spread, drift, times=12, members=3):
    """A bank of chains around a freshly initialised network."""
    g, start = torch.Generator().manual_seed(0), P.of(NET)
    with CheckpointBank(path) as target:
        for time in range(times):
            for member in range(members):
                noise = {n: spread * torch.randn(t.shape, generator=g) for n, t in start.items()}
                network = {n: t.detach() + noise[n] + drift * member for n, t in start.items()}
                target.append(network, member=member, step=time)


def test_a_bank_of_networks_that_know_nothing(tmp_path, capsys):
    bank(tmp_path / "bank", 6)
    place, like = f"{tmp_path / 'bank'}[1:5]", config(tmp_path)
    assert code_of("doctor", place, "--data", like, "--out", tmp_path / "o") == FAULTY
    said = capsys.readouterr().out
    report = Report.read(tmp_path / "o" / "doctor.json")
    assert "no_better_than_frequencies" in report.names()
    assert all(f.says in said for f in report.findings)
    assert report.facts["modes"] == 4
    assert code_of("doctor", place, "--data", like, "--json") == FAULTY
    found = json.loads(capsys.readouterr().out)["findings"]
    assert [finding["name"] for finding in found] == [f.name for f in report.findings]


@pytest.mark.parametrize("method", ["HMC", "DeepEnsemble"])
def test_chains_are_known_by_the_configuration(method, tmp_path, capsys):
    chains(tmp_path / "bank", 0.05, drift=0.2)
    settings = {**CONFIG, "model": {**CONFIG["model"], "class_path": method}}
    (tmp_path / "like.yaml").write_text(yaml.safe_dump(settings))
    assert code_of("doctor", tmp_path / "bank", "--data", tmp_path / "like.yaml") == FAULTY
    assert ("R-hat" in capsys.readouterr().out) == (method == "HMC")  # an ensemble is no chain


@pytest.mark.e2e
def test_a_run_with_what_the_callback_has_seen(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = ["--trainer.max_epochs", "6", "--trainer.accelerator", "cpu"]
    quiet = ["--trainer.enable_progress_bar", "false"]
    doctor = ["--trainer.callbacks+", "lightning_bnn.callbacks.PosteriorDoctor"]
    main(["fit", "-c", str(config(tmp_path)), *options, *quiet, *doctor])
    (seen,) = tmp_path.rglob("doctor.json")
    code_of("doctor", tmp_path / "lightning_logs" / "version_0", "--out", "o")
    again, first = Report.read(tmp_path / "o" / "doctor.json"), Report.read(seen)
    assert again.curves == first.curves
    assert len(again.curves["loss"]) == 6
    assert "loss_not_converged" in {*again.fine, *again.names()}


@pytest.mark.parametrize(("decay", "shown"), [("1e-3", "0.001"), (0.25, "0.25"), (0.0, None)])
def test_numbers_that_yaml_takes_for_words_are_numbers(decay, shown, tmp_path, capsys):
    bank(tmp_path / "bank", 2)
    optimizer = {"class_path": "torch.optim.Adam", "init_args": {"weight_decay": decay}}
    arguments = {**CONFIG["model"]["init_args"], "prior_std": "1e-1", "optimizer": optimizer}
    model = {"class_path": "DeepEnsemble", "init_args": arguments}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({**CONFIG, "model": model}, default_style=None))
    code_of("doctor", tmp_path / "bank", "--data", tmp_path / "c.yaml")
    said = capsys.readouterr().out
    found = f"weight decay of {shown} beside a prior of standard deviation 0.1"
    assert (found in said) == (shown is not None)


STATED = {
    "the module": ("IVON", {"temperature": 0.5}, {"temperature": 1.0}, "temperature is 0.5"),
    "the optimizer": ("IVON", {"temperature": None}, {"temperature": 0.5}, "temperature is 0.5"),
    "a weight": ("MFVI", {"kl_weight": 0.5}, {}, "weight of the KL term is 0.5"),
    "a default": (
        "MFVI", {"prior_std": ...}, {"weight_decay": 0.1}, "beside a prior of standard deviation 1"
    ),
    "nothing": ("IVON", {"temperature": None}, {"temperature": 1.0}, None),
}  # fmt: skip


@pytest.mark.parametrize("case", STATED)
def test_departures_from_bayes_are_read_from_the_configuration(case, tmp_path, capsys):
    """Of the module and of its optimizer, each written with its defaults, as `fit` writes them."""
    bank(tmp_path / "bank", 2)
    name, options, of_optimizer, words = STATED[case]
    optimizer = {"class_path": "torch.optim.Adam", "init_args": of_optimizer}
    arguments = {**CONFIG["model"]["init_args"], "optimizer": optimizer, **options}
    arguments = {k: v for k, v in arguments.items() if v is not ...}
    model = {"class_path": name, "init_args": arguments}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({**CONFIG, "model": model}))
    code_of("doctor", tmp_path / "bank", "--data", tmp_path / "c.yaml")
    said = capsys.readouterr().out
    assert words in said if words else "temperature is" not in said and "KL term is" not in said


# ------------------------------------------------------------ what is refused
@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("none --data like.yaml", "nothing at"),
        ("bank", "no `config.yaml` beside it"),
        ("bank --data like.yaml --samples 0", "`samples`"),
        ("bank --data other.yaml", ""),
    ],
)
def test_mistakes_are_told_in_a_sentence(args, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bank("bank", 2)
    other = {**CONFIG, "data": {"class_path": "TwoGaussians"}}
    (config(tmp_path).parent / "other.yaml").write_text(yaml.safe_dump(other))
    assert message in failure(capsys, "doctor", *args.split())

"""`lightning-bnn doctor` as a user calls it: runs, banks, folders, and what is none of them."""

import pytest
import torch
import yaml
from shell import code_of, failure
from small_runs import CONFIG, NET, bank, config

from lightning_bnn.cli import main
from lightning_bnn.commands.doctor import FAULTY
from lightning_bnn.doctor import Report
from weightsym import params as P

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("undrawn")]


def chains(path, spread, drift=0.0, times=12, members=3):
    """A bank of chains around freshly initialised networks, or around one of them."""
    from lightning_bnn.bank import CheckpointBank

    g = torch.Generator().manual_seed(0)
    start = P.of(NET)
    with CheckpointBank(path) as target:
        for time in range(times):
            networks = [
                {
                    n: t.detach() + (spread * torch.randn(t.shape, generator=g) + drift * m)
                    for n, t in start.items()
                }
                for m in range(members)
            ]
            records = [{"member": m, "step": time} for m in range(members)]
            target.extend(P.stack(networks), records)


def sampled(folder):
    """The configuration of a sampler."""
    path = folder / "sampler.yaml"
    model = {**CONFIG["model"], "class_path": "HMC"}
    path.write_text(yaml.safe_dump({**CONFIG, "model": model}))
    return path


def test_a_bank_of_networks_that_know_nothing(tmp_path, capsys):
    bank(tmp_path / "bank", 4)
    code = code_of("doctor", tmp_path / "bank", "--data", config(tmp_path), "--out", tmp_path / "o")
    assert code == FAULTY
    said = capsys.readouterr().out
    report = Report.read(tmp_path / "o" / "doctor.json")
    assert "no_better_than_frequencies" in report.names()
    assert all(f.says in said for f in report.findings)
    assert report.facts["modes"] == 4


def test_rows_of_a_bank_are_chosen(tmp_path, capsys):
    bank(tmp_path / "bank", 6)
    code_of("doctor", f"{tmp_path / 'bank'}[1:3]", "--data", config(tmp_path))
    assert "modes 2" in capsys.readouterr().out


def test_chains_are_known_by_the_configuration(tmp_path, capsys):
    chains(tmp_path / "bank", 0.05, drift=0.2)
    assert code_of("doctor", tmp_path / "bank", "--data", sampled(tmp_path)) == FAULTY
    assert "R-hat" in capsys.readouterr().out
    code_of("doctor", tmp_path / "bank", "--data", config(tmp_path))
    assert "R-hat" not in capsys.readouterr().out  # an ensemble is no chain


def test_a_folder_of_plain_files(tmp_path, capsys):
    folder = tmp_path / "files"
    folder.mkdir()
    for k in range(2):
        torch.save(P.of(NET), folder / f"{k}.pt")
    assert code_of("doctor", folder, "--data", config(tmp_path)) == FAULTY
    assert "predict the same" in capsys.readouterr().out


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


# ------------------------------------------------------------ what is refused


@pytest.mark.bad_input
def test_mistakes_are_told_in_a_sentence(tmp_path, capsys):
    bank(tmp_path / "bank", 2)
    like = config(tmp_path)
    assert "nothing at" in failure(capsys, "doctor", tmp_path / "none", "--data", like)
    assert "no `config.yaml` beside it" in failure(capsys, "doctor", tmp_path / "bank")
    few = ("doctor", tmp_path / "bank", "--data", like, "--samples", "0")
    assert "`samples`" in failure(capsys, *few)
    other = {**CONFIG, "data": {"class_path": "TwoGaussians"}}
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(other))
    wrong = ("doctor", tmp_path / "bank", "--data", tmp_path / "other.yaml")
    assert failure(capsys, *wrong)

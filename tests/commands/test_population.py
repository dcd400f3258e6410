"""Populations in parts, resumed after kills, on one machine or several."""

import json
import random
import time
from pathlib import Path

import pytest
import torch
import yaml
from processes import start
from small_populations import CONFIG, networks, same

from lightning_bnn.bank import CheckpointBank
from lightning_bnn.cli import main
from lightning_bnn.commands import parts
from lightning_bnn.commands.bank import bank
from lightning_bnn.commands.population import population


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    return str(path)


def test_members_do_not_depend_on_the_parts_nor_on_when_they_were_asked_for(
    config, tmp_path, capsys
):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    population(config, 5, str(whole))
    population(config, 3, str(parts), part=2)
    before = networks(parts)
    stamps = {p: p.stat().st_mtime for p in parts.rglob("part.json")}
    population(config, 3, str(parts), part=2)
    assert {p: p.stat().st_mtime for p in stamps} == stamps
    same(before, networks(parts))
    population(config, 5, str(parts), part=9)
    after = networks(parts)
    assert sorted(p.name for p in (parts / "parts").iterdir()) == [
        "0000000-0000002", "0000002-0000003", "0000003-0000005",
    ]  # fmt: skip
    same(before, {m: after[m] for m in before})
    same(networks(whole), after, exact=False)
    assert not torch.equal(after[0]["1.weight"], after[1]["1.weight"])
    assert "5 networks" in capsys.readouterr().out
    losses = {r["member"]: r["loss"] for r in CheckpointBank(whole, "r").records}
    limit = sorted(losses.values())[2] + 1e-6
    population(config, 5, str(tmp_path / "some"), change={"model.init_args.max_loss": limit})
    kept = sorted(m for m, loss in losses.items() if loss <= limit)
    assert sorted(networks(tmp_path / "some")) == kept
    assert "2 of 5 members have diverged" in capsys.readouterr().out


def test_records_tell_members_losses_and_steps(config, tmp_path):
    population(config, 2, str(tmp_path / "bank"), every_n_epochs=2, part=1)
    records = CheckpointBank(tmp_path / "bank", "r").records
    assert [(r["member"], r["step"]) for r in records] == [(0, 20), (0, 30), (1, 20), (1, 30)]
    assert all(r["loss"] > 0 for r in records)


def test_a_part_that_breaks_before_its_validation_does_not_stop_the_others(tmp_path, capsys):
    """And a preset may be named."""
    few = {"trainer.max_epochs": 1, "trainer.logger": False, "trainer.callbacks": []}
    wild = {"class_path": "torch.optim.SGD", "init_args": {"lr": 1e38}}
    change = few | {"model.init_args.optimizer": wild}
    population("digits_ensemble", 2, str(tmp_path / "bank"), change=change, part=1)
    assert "0 networks, 2 of 2 members have diverged" in capsys.readouterr().out
    for members in (2, 1):
        population("digits_ensemble", members, str(tmp_path / "other"), change=few)
    assert "nothing left to train" in capsys.readouterr().out
    assert "metrics" not in CheckpointBank(tmp_path / "other", "r").records[0]


# ------------------------------------------------------------ kills
@pytest.mark.bad_input
def test_another_configuration_does_not_touch_what_has_begun(config, tmp_path, monkeypatch):
    bank, more = tmp_path / "bank", {"trainer.max_epochs": 4}

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(parts, "_outcome", killed)
        with pytest.raises(KeyboardInterrupt):
            population(config, 2, str(bank), checkpoint_minutes=1e-6)
    saved = list(bank.rglob("*.ckpt"))
    with pytest.raises(ValueError, match="trainer.max_epochs: 3 there, 4 here"):
        population(config, 2, str(bank), change=more)
    assert list(bank.rglob("*.ckpt")) == saved != []
    for path in saved:
        path.unlink()
    with CheckpointBank(bank), pytest.raises(ValueError, match="open for appending"):
        population(config, 2, str(bank), change=more)
    assert list(bank.glob("parts/*/config.yaml"))
    population(config, 2, str(bank), change=more)  # it came to nothing
    assert CheckpointBank(bank, "r").records[0]["epoch"] == 4


LONG = ["--change", json.dumps({"trainer.max_epochs": 80})]


def started(config, bank):
    args = ["--config", config, "--members", "4", "--bank", bank, "--part", "2"]
    return start(main, ["population", *args, "--checkpoint_minutes", "0.005", *LONG])


def begun(bank, seconds=120):
    """Wait until some part has made a checkpoint since now."""
    until, since = time.monotonic() + seconds, time.time()
    while time.monotonic() < until:
        if any(path.stat().st_mtime > since for path in Path(bank).rglob("*.ckpt")):
            return True
        time.sleep(0.02)
    return False


@pytest.mark.e2e
def test_killed_at_random_nobody_is_lost_or_doubled(config, tmp_path):
    whole, bank = str(tmp_path / "whole"), str(tmp_path / "killed")
    started(config, whole).result()
    rng = random.Random(0)
    for _ in range(2):
        run = started(config, bank)
        assert begun(bank)
        time.sleep(0.3 * rng.random())
        run.process.kill()
        run.process.join()
    started(config, bank).result()
    same(networks(whole), networks(bank))


# ------------------------------------------------------------ several machines
def test_banks_of_several_machines_are_joined(config, tmp_path):
    whole, joined, part = (str(tmp_path / name) for name in ("whole", "joined", "part"))
    population(config, 5, whole, part=2)
    population(config, 2, joined, part=2)
    for _ in range(2):  # the second call finds nothing to do
        population(config, 5, part, first=2, part=2)
    bank(joined, add=part)
    same(networks(whole), networks(joined))


# ------------------------------------------------------------ bad input
@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"members": 0}, "`members` must be at least 1"),
        ({"part": 0}, "`part` must be at least 1"),
        ({"first": 2}, "`members` must be at least 3"),
        ({"config": "nowhere.yaml"}, "`config`: there is no file nowhere.yaml, and no preset"),
        ({"checkpoint_minutes": 0.0}, "`checkpoint_minutes` must be positive"),
        ({"change": {"trainer.devices": 2}}, "a part of a population trains on one device"),
        ({"change": {"trainer.fast_dev_run": True}}, "cannot be a `fast_dev_run`"),
        ({"change": {"trainer": None}}, "`config`: trainer must be a group of settings, got None"),
        ({"change": {"model": [1]}}, r"`config`: model must be a group of settings, got \[1\]"),
        ({"change": {"seed_everything.x": 1}}, "`change`: seed_everything.x does not fit"),
    ],
)
def test_bad_arguments(config, tmp_path, changed, message):
    arguments = {"config": config, "members": 2, "bank": str(tmp_path / "bank"), **changed}
    with pytest.raises(ValueError, match=message):
        population(**arguments)


@pytest.mark.bad_input
def test_a_mistake_does_not_claim_the_folder_and_other_members_are_not_mixed(config, tmp_path):
    bank = str(tmp_path / "bank")
    with pytest.raises(Exception, match="max_epoch"):
        population(config, 2, bank, change={"trainer.max_epoch": 2})
    population(config, 2, bank, change={"trainer.max_epochs": 2})
    assert sorted(networks(bank)) == [0, 1]
    with pytest.raises(ValueError, match="trainer.max_epochs: 2 there, 3 here"):
        population(config, 2, bank)
    same_members = {"model.init_args.members": 7, "data.init_args.orders": 9}
    population(config, 2, bank, change={"trainer.max_epochs": 2} | same_members)
    with CheckpointBank(tmp_path / "other") as other:
        other.append({"w": torch.zeros(2)})
    for place in (str(tmp_path / "other"), config):
        with pytest.raises(ValueError, match="is not a population"):
            population(config, 2, place)

"""`lightning-bnn demo` and the runs of studies: again and again, interrupted or not."""

import re
import shutil
from pathlib import Path

import lightning as L
import processes
import pytest
import torch
from kills import kills
from shell import code_of, failure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_bnn.bank import CheckpointBank
from lightning_bnn.cli import main
from lightning_bnn.commands import demo as demo_study
from lightning_bnn.commands import runs
from lightning_bnn.commands.demo import GLOSSARY, METHODS, SAMPLED, demo_jobs, explained
from lightning_bnn.commands.presets import preset_text
from lightning_bnn.tables import Table
from weightsym.networks.files.loading import load

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, undrawn):
    """A demo that was interrupted in its third run, and then called again."""
    out = tmp_path_factory.mktemp("demo")
    kept, begun = runs._train, []

    def interrupted(run, epochs):
        begun.append(run.job.name)
        if len(begun) == 3:
            raise KeyboardInterrupt
        kept(run, epochs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "_train", interrupted)
        with pytest.raises(SystemExit) as end:
            main(["demo", "--size", "smallest", "--out", str(out)])
    assert end.value.code == 130
    assert begun == ["reference", "ensemble", "dropout"]
    assert not (out / "report.html").exists()
    again = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "_train", lambda run, e: again.append(run.job.name) or kept(run, e))
        main(["demo", "--size", "smallest", "--out", str(out)])
    assert again == [*list(METHODS)[1:], SAMPLED]
    return out


@pytest.mark.e2e
def test_one_page_with_everything(folder):
    page = (folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") >= 5
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert page.count("<details>") == page.count("<table>") - 1  # all but what to take
    assert page.index("<figure>") < page.index("What to take") < page.index("<details>")
    for text in (
        *(f"<td>{name}</td>" for name in METHODS.values()),
        "<th>NS law</th>",
        "NLL: ",  # abbreviations are explained
        "sampled: draws of the posterior itself",
        "NOT KNOWN whether chains agree",
        "lightning-bnn fit -c demo_swag.yaml",
    ):
        assert text in page
    assert str(folder) not in page
    assert "nan" not in re.sub(r'base64,[^"]*', "", page).lower().replace("nanc", "")
    times = dict(re.findall(r"<td>([^<]+)</td><td>([\d.]+)</td>", page.partition("How long")[2]))
    assert {"Reference", "HMC"} < times.keys()
    for name, title in METHODS.items():  # runs of earlier calls keep the time that they took then
        kept = float((folder / "runs" / name / "cpu_seconds").read_text())
        assert float(times[title]) == kept > 0


def test_only_what_a_table_has_is_explained():
    table = Table("", ["method", "NLL"], [["SWAG", 1.0]], note="A note.")
    note = explained(table).note
    assert note.endswith(". A note.")
    assert [word for word in GLOSSARY if f"{word}: " in note] == ["NLL", "SWAG"]
    assert explained(Table("", ["method"], [["NLLs"]], note="A note.")).note == "A note."


@pytest.mark.parametrize(
    ("variables", "terminal", "opens"),
    [(["DISPLAY"], True, True), (["WAYLAND_DISPLAY"], True, True), (["DISPLAY"], False, False),
     ([], True, False)],
)  # fmt: skip
def test_the_page_opens_where_there_is_a_screen(variables, terminal, opens, monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    for name in variables:
        monkeypatch.setenv(name, ":0")
    monkeypatch.setattr(demo_study.sys, "platform", "linux")
    monkeypatch.setattr(demo_study.sys.stdout, "isatty", lambda: terminal, raising=False)
    assert demo_study.has_screen() == opens


@pytest.mark.e2e
def test_called_again_it_trains_nothing_and_writes_the_page(folder, monkeypatch, capsys):
    monkeypatch.setattr(runs, "_train", lambda *_: pytest.fail("trained again"))
    before = (folder / "report.html").stat().st_mtime_ns
    main(["demo", "--size", "smallest", "--out", str(folder)])
    assert (folder / "report.html").stat().st_mtime_ns > before
    out = capsys.readouterr().out
    assert str((folder / "report.html").resolve()) in out
    assert f"tensorboard --logdir {folder / 'runs'}" in out
    (events,) = (folder / "runs" / "mfvi").rglob("events.out.tfevents.*")
    assert {"train/loss", "tau"} <= {*EventAccumulator(str(events)).Reload().Tags()["scalars"]}


@pytest.mark.e2e
def test_other_settings_begin_anew(folder, monkeypatch):
    trained = []
    monkeypatch.setattr(runs, "_train", lambda run, _: trained.append(run.job.name))
    runs.run_jobs(demo_jobs("smallest")[:2], folder / "runs")
    assert trained == []
    for epochs in (1, 2):
        job = runs.Job("ensemble", "demo_ensemble", {"trainer.max_epochs": epochs})
        runs.run_jobs([job], folder / "copies")
        assert not (folder / "copies" / "ensemble" / "old").exists()
        (folder / "copies" / "ensemble" / "old").write_text("")
    assert trained == ["ensemble", "ensemble"]


def test_restart_removes_the_runs_of_a_demo_only(tmp_path, monkeypatch, capsys):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("lightning_bnn.commands.demo.run_jobs", stopped)
    out = tmp_path / "demo"
    assert code_of("demo", "--out", out) == 130
    (out / "runs" / "x").mkdir(parents=True)
    for restart in ("false", "true"):
        assert code_of("demo", "--restart", restart, "--out", out) == 130
        assert (out / "runs" / "x").exists() == (restart == "false")
    (tmp_path / "runs").mkdir()
    capsys.readouterr()
    message = failure(capsys, "demo", "--restart", "true", "--out", tmp_path)
    assert "choose a new folder" in message
    assert (tmp_path / "runs").exists()


@pytest.mark.e2e
def test_jobs_beside_others_are_as_if_they_were_alone(tmp_path, capfd):
    first, second = demo_jobs("smallest")[1:3]
    bad = runs.Job("bad", "demo_ensemble", {"model.init_args.members": 0})
    with runs.beside(runs.run_jobs, [first, bad], tmp_path / "both"):
        runs.run_jobs([second], tmp_path / "both")
    assert (tmp_path / "both" / second.name / "finished").exists()
    runs.run_jobs([first], tmp_path / "alone")
    both, alone = (
        load(next((tmp_path / place / first.name).rglob("*.ckpt")))["state_dict"]
        for place in ("both", "alone")
    )
    assert all(torch.equal(both[name], tensor) for name, tensor in alone.items())
    with pytest.raises((ValueError, SystemExit)):  # what a process leaves undone is explained
        runs.run_jobs([bad], tmp_path / "both")


# ------------------------------------------------------------ runs
class Saves(L.Callback):
    """Notes the epochs that begin, and fails in one of them if it is to."""

    def __init__(self, stop_in=None):
        self.begun, self.stop_in = [], stop_in

    def on_train_epoch_start(self, trainer, pl_module):
        self.begun.append(trainer.current_epoch)
        assert trainer.current_epoch != self.stop_in, "killed"


def job(*callbacks):
    changes = {"trainer.max_epochs": 4, "model.init_args.members": 2}
    return runs.Job("run", "demo_ensemble", changes, callbacks, preset_text("demo_ensemble"))


@pytest.mark.e2e
@pytest.mark.parametrize(("seconds", "continues_with"), [(0.0, 2), (1e6, 0)])
def test_what_an_interruption_costs_is_a_time_and_not_an_epoch(
    tmp_path, monkeypatch, seconds, continues_with
):
    monkeypatch.setattr(runs, "_BETWEEN_CHECKPOINTS", seconds)
    with pytest.raises(AssertionError, match="killed"):
        runs.run_jobs([job(Saves(stop_in=2))], tmp_path)
    saves = Saves()
    resumed = runs.run_jobs([job(saves)], tmp_path)["run"].module()
    assert saves.begun == list(range(continues_with, 4))
    assert list(tmp_path.rglob(f"epoch={3}-*.ckpt"))  # the last is always there
    whole = runs.run_jobs([job()], tmp_path / "other")["run"].module()
    for one, two in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(one, two)


TINY = """
seed_everything: 1
trainer:
  max_epochs: 2
  accelerator: cpu
  logger: false
  callbacks: [{class_path: CheckpointHarvester, init_args: {every_n_epochs: 1}}]
model:
  class_path: lightning_bnn.modules.DeepEnsemble
  init_args:
    network:
      class_path: lightning_bnn.models.mlp
      init_args: {inputs: 2, hidden: [3], outputs: 2}
    members: 2
    seed: 0
data: {class_path: lightning_bnn.datamodules.TwoGaussians, init_args: {size: 20}}
"""


def outcome(run):
    """All tensors of a finished run: of its checkpoint and of its bank."""
    assert run.is_finished
    (path,) = run.folder.rglob("*.ckpt")
    bank = CheckpointBank(run.folder / "bank", "r")
    assert [(r["step"], r["member"]) for r in bank.records] == [(4, 0), (4, 1), (8, 0), (8, 1)]
    return {**load(path)["state_dict"], **{f"bank {name}": t for name, t in bank[:].items()}}


def killed_everywhere(place):
    """How often a run was killed that each time ended with the networks of one that was not."""
    tiny, folder = runs.Job("run", "tiny", text=TINY), Path(place) / "killed"

    def run():
        return runs.run_jobs([tiny], folder)["run"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "_BETWEEN_CHECKPOINTS", 0.0)
        whole = outcome(runs.run_jobs([tiny], Path(place) / "whole")["run"])
        count = 0
        for _ in kills(run, folder, lambda: shutil.rmtree(folder, ignore_errors=True), 3):
            found = outcome(run())
            assert found.keys() == whole.keys()
            assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
            count += 1
    return count


@pytest.mark.e2e
def test_a_run_that_is_killed_at_any_moment_ends_as_if_it_had_not_been(tmp_path):
    """In a process without threads of autograd, which a fork cannot follow."""
    assert processes.result(killed_everywhere, str(tmp_path), timeout=600) > 9


@pytest.mark.e2e
def test_a_run_is_discarded_as_a_whole(tmp_path):
    """Killed while it removes what other settings have made, it goes on from nothing of that."""
    tiny = runs.Job("run", "tiny", text=TINY)
    longer = runs.Job("run", "tiny", {"trainer.max_epochs": 3}, text=TINY)
    runs.run_jobs([longer], tmp_path / "longer")
    whole = outcome(runs.run_jobs([tiny], tmp_path / "whole")["run"])
    folder = tmp_path / "killed"

    def prepared():
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "longer", folder)

    def prepare():
        assert not runs._prepared(runs.StoredRun(tiny, folder / "run"))

    for _ in kills(prepare, folder, prepared, 4):
        found = outcome(runs.run_jobs([tiny], folder)["run"])
        assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())

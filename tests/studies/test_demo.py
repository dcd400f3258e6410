"""`lightning-bnn demo`: one page, again and again, interrupted or not."""

import re

import pytest
import torch

from lightning_bnn.cli import main
from lightning_bnn.studies import demo as demo_study
from lightning_bnn.studies import runs
from lightning_bnn.studies.demo import GLOSSARY, METHODS, SAMPLED, demo_jobs, explained
from lightning_bnn.tables import Table
from weightsym.loading import load

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
    for name in METHODS.values():
        assert f"<td>{name}</td>" in page
    assert "<th>NS law</th>" in page
    opening, figure, _ = page.partition("<figure>")
    assert figure
    assert "<h2>" not in opening.partition("</style>")[2]
    assert opening.count(". ") + opening.count(".</p>") <= 4  # sentences, numbers have no space
    assert page.count("<details>") == page.count("<table>") - 1  # all but what to take
    assert page.index("What to take") < page.index("<details>")
    assert "sampled: draws of the posterior itself" in page
    assert "networks of 3 chains, sampled" in page
    assert "NOT KNOWN whether chains agree" in page
    assert str(folder) not in page
    assert "lightning-bnn fit -c demo_swag.yaml" in page
    assert "nan" not in re.sub(r'base64,[^"]*', "", page).lower().replace("nanc", "")


@pytest.mark.e2e
def test_abbreviations_are_explained_where_they_stand(folder):
    page = (folder / "report.html").read_text()
    for table in re.findall(r"<table>.*?</table></div>(?:<p.*?</p>)?", page, re.DOTALL):
        shown, _, note = table.partition("</table>")
        headings = " ".join(re.findall(r"<th>(.*?)</th>", shown))
        for word in GLOSSARY:
            if re.search(rf"(?<!\w){re.escape(word)}(?!\w)", headings):
                assert f"{word}: " in note, word


def test_only_what_a_table_has_is_explained():
    table = Table("", ["method", "NLL"], [["SWAG", 1.0]], note="A note.")
    note = explained(table).note
    assert note.endswith(". A note.")
    assert [word for word in GLOSSARY if f"{word}: " in note] == ["NLL", "SWAG"]
    assert explained(Table("", ["method"], [["NLLs"]], note="A note.")).note == "A note."


@pytest.mark.e2e
def test_the_page_says_how_long_each_part_took(folder):
    """Runs of earlier calls keep the time that they took then."""
    page = (folder / "report.html").read_text().partition("How long did it take?")[2]
    rows = dict(re.findall(r"<td>([^<]+)</td><td>([\d.]+)</td>", page))
    assert {"Reference", "HMC", *METHODS.values()} < rows.keys()
    assert all(float(seconds) > 0 for seconds in rows.values())
    kept = {
        title: (folder / "runs" / name / "cpu_seconds").read_text()
        for name, title in METHODS.items()
    }
    assert {title: float(rows[title]) for title in kept} == {t: float(s) for t, s in kept.items()}


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


@pytest.mark.e2e
def test_the_runs_hold_curves_of_the_callbacks(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = (folder / "runs" / "mfvi").rglob("events.out.tfevents.*")
    tags = EventAccumulator(str(events)).Reload().Tags()
    assert {"train/loss", "tau"} <= set(tags["scalars"])


@pytest.mark.e2e
def test_other_settings_begin_anew(folder, monkeypatch):
    trained = []
    monkeypatch.setattr(runs, "_train", lambda run, _: trained.append(run.job.name))
    jobs = demo_jobs("smallest")[:2]
    (folder / "runs" / "other").mkdir()
    runs.run_jobs(jobs, folder / "runs")
    assert trained == []
    changed = [runs.Job("ensemble", "demo_ensemble", {"trainer.max_epochs": 1})]
    runs.run_jobs(changed, folder / "copies")
    assert trained == ["ensemble"]
    (folder / "copies" / "ensemble" / "old").write_text("")
    again = [runs.Job("ensemble", "demo_ensemble", {"trainer.max_epochs": 2})]
    runs.run_jobs(again, folder / "copies")
    assert trained == ["ensemble", "ensemble"]
    assert not (folder / "copies" / "ensemble" / "old").exists()


def test_restart_removes_the_runs_of_a_demo_only(tmp_path, monkeypatch, capsys):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("lightning_bnn.studies.demo.run_jobs", stopped)
    out = tmp_path / "demo"
    for restart, left in (("false", True), ("true", False)):
        with pytest.raises(SystemExit) as end:
            main(["demo", "--restart", restart, "--out", str(out)])
        assert end.value.code == 130
        assert (out / "runs" / "x").exists() == (left and restart == "true")
        (out / "runs" / "x").mkdir(parents=True, exist_ok=True)
    (tmp_path / "runs").mkdir()
    with pytest.raises(SystemExit) as end:
        main(["demo", "--restart", "true", "--out", str(tmp_path)])
    assert end.value.code == 2
    assert (tmp_path / "runs").exists()
    assert "choose a new folder" in capsys.readouterr().err


@pytest.mark.e2e
def test_jobs_beside_others_are_as_if_they_were_alone(tmp_path):
    first, second = demo_jobs("smallest")[1:3]
    with runs.beside(runs.run_jobs, [first], tmp_path / "both"):
        runs.run_jobs([second], tmp_path / "both")
        assert (tmp_path / "both" / second.name / "finished").exists()
    assert (tmp_path / "both" / first.name / "finished").exists()
    weights = [
        load(next((tmp_path / place / first.name).rglob("*.ckpt")))["state_dict"]
        for place, _ in (("both", 0), ("alone", runs.run_jobs([first], tmp_path / "alone")))
    ]
    assert all(torch.equal(weights[0][name], tensor) for name, tensor in weights[1].items())


@pytest.mark.e2e
def test_what_a_process_leaves_undone_is_done_or_explained(tmp_path, capfd):
    job = runs.Job("bad", "demo_ensemble", {"model.init_args.members": 0})
    with runs.beside(runs.run_jobs, [job], tmp_path):
        pass
    with pytest.raises((ValueError, SystemExit)):
        runs.run_jobs([job], tmp_path)

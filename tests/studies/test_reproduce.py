"""`lightning-bnn reproduce`: every step once, whatever happens to the others."""

import dataclasses
import json

import pytest
from small_runs import results

import lightning_bnn
from lightning_bnn.cli import main
from lightning_bnn.datamodules import MissingData
from lightning_bnn.studies import reproduce as command
from lightning_bnn.studies.claims import steps
from lightning_bnn.studies.claims.steps import STEPS, Record, Step, evidence_in

pytestmark = pytest.mark.filterwarnings("ignore")
CALLS = []


@dataclasses.dataclass(frozen=True)
class Fake(Step):
    """A step whose study only says that it was called."""

    error: Exception | None = None

    def function(self):
        """What stands for the study."""

        def study(out, seed=0, **options):
            CALLS.append((self.name, seed))
            if self.error is not None:
                raise self.error
            steps.Path(out).mkdir(parents=True, exist_ok=True)
            header, rows = ["", "here", "note"], [["not converged, %", 0.5 + 0.01 * seed, ""]]
            content = {"title": "", "header": header, "rows": rows, "note": ""}
            (steps.Path(out) / "results.json").write_text(
                json.dumps({"settings": {}, "tables": {"weights": content}})
            )

        return study


@pytest.fixture
def fakes(monkeypatch, tmp_path):
    """A step that works, and others that fail, lack their data, or wait for these."""
    CALLS.clear()
    chosen = (
        Fake("mass", "p1", "mass", 1, error=RuntimeError("out of luck")),
        Fake("toy", "p1", "toy", 1),
        Fake(
            "mnist/runs", "p1", "runs.optunets", None, seeded=False, error=MissingData("no files")
        ),
        Fake("mnist/mass", "p1", "mass", 1, smallest=None, seeded=False, after="mnist/runs"),
    )
    for module in (steps, command):
        monkeypatch.setattr(module, "STEPS", chosen)
    monkeypatch.chdir(tmp_path)
    return chosen


def verdicts(folder):
    rows = results(folder)["tables"]["p1"]["rows"]
    return {row[0]: row[3] for row in rows}


def test_a_step_that_fails_stops_no_other(fakes, capsys):
    command.reproduce("p1", seeds=2, out="out")
    printed, told = capsys.readouterr()
    assert CALLS == [("mass", 0), ("mass", 1), ("toy", 0), ("toy", 1), ("mnist/runs", 0)]
    found = verdicts("out")
    assert (
        found["less than 1 % of the runs have not converged (loss of the last epoch above 0.01)"]
        == "holds"
    )
    assert (
        "`mass` failed: RuntimeError: out of luck"
        in found["trained networks are far above their minimum mass (digits, by Adam)"]
    )
    assert "`mnist/mass` skipped: `mnist/runs` has not finished" in found["mass, minimum mass"]
    assert "mnist/runs skipped: no files" in printed + told
    assert "0.505 ± 0.0071" in printed
    assert "fewer than 1 % in every run" in steps.Path("out/README.md").read_text()


def test_what_has_finished_is_not_done_again(fakes, capsys):
    command.reproduce("toy", seeds=2, out="out")
    CALLS.clear()
    part = evidence_in(steps.Path("out").resolve(), 3, "full")
    assert part.absent["toy"] == "`toy` has finished 2 of 3 seeds"
    command.reproduce("toy", seeds=3, out="out")
    assert CALLS == [("toy", 2)]
    assert len(evidence_in(steps.Path("out").resolve(), 3, "full").of("toy")) == 3
    command.reproduce("toy,mass", seeds=1, out="out")
    assert CALLS[1:] == [("mass", 0)]
    CALLS.clear()
    command.reproduce(["toy"], seeds=1, out="out", again=True)
    assert CALLS == [("toy", 0)]
    capsys.readouterr()
    CALLS.clear()
    command.reproduce(list=True, out="out")
    assert "mnist/mass" in capsys.readouterr().out
    command.reproduce(list=True, size="smallest", out="out")
    assert "mnist/mass" not in capsys.readouterr().out
    assert not CALLS


def test_another_version_begins_anew(fakes, monkeypatch):
    command.reproduce("toy", seeds=1, out="out")
    monkeypatch.setattr(lightning_bnn, "__version__", "another")
    assert "has not been run" in evidence_in(steps.Path("out").resolve(), 1, "full").absent["toy"]
    command.reproduce("toy", seeds=1, out="out")
    assert CALLS == [("toy", 0)] * 2


def test_keys_know_the_arguments_and_the_source(tmp_path):
    toy, mass = (step for step in STEPS if step.name in ("toy", "mass"))
    keys = {toy.key(tmp_path, seed, size) for seed in (0, 1) for size in ("full", "smallest")}
    keys |= {dataclasses.replace(toy, study="width").key(tmp_path, 0, "full")}
    keys |= {dataclasses.replace(toy, options={"members": 3}).key(tmp_path, 0, "full")}
    assert len(keys | {mass.key(tmp_path, 0, "full")}) == 7
    assert toy.key(tmp_path, 0, "full") == toy.key(tmp_path / "moved", 0, "full")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"key": 1, "more": 2}'])
def test_a_record_that_cannot_be_read_is_none(text, tmp_path):
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "toy.0.json").write_text(text)
    assert STEPS[0].record(tmp_path, 0, "full") == Record()


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"seeds": 0}, "`seeds` must be at least 1, got 0"), ({"only": "p9"}, "`only` must be of p1")],
)
def test_what_is_refused(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        command.reproduce(**arguments, out=str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.e2e
def test_the_smallest_size_runs_through_everything(tmp_path, capsys):
    args = ["reproduce", "--size", "smallest", "--seeds", "1", "--out", str(tmp_path / "out")]
    main(args)
    states = {row[0]: row[-1] for row in results(tmp_path / "out")["tables"]["steps"]["rows"]}
    small = {step.name for step in STEPS if step.smallest is not None}
    assert {name for name, state in states.items() if state == "finished"} == small
    found = [
        row for p in ("p1", "p2", "p3") for row in results(tmp_path / "out")["tables"][p]["rows"]
    ]
    tested = [row for row in found if not row[3].startswith("not tested")]
    assert len(tested) > 25
    assert not [row for row in found if "failed" in row[3]]
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*.ckpt")}
    capsys.readouterr()
    main(args)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*.ckpt")} == before
    assert "holds" in capsys.readouterr().out

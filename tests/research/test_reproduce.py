"""`bnn-research reproduce`: every step once, whatever happens to the others."""

import dataclasses
import json
from pathlib import Path

import pytest
from small_runs import results

import lightning_bnn
from bnn_research import reproduce as command
from bnn_research.claims import steps
from bnn_research.claims.steps import STEPS, Record, Step, evidence_in
from bnn_research.cli import main
from lightning_bnn.datamodules import MissingData

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
            rows = [["not converged, %", 0.5 + 0.01 * seed, ""]]
            content = {"title": "", "header": ["", "here", "note"], "rows": rows, "note": ""}
            Path(out).mkdir(parents=True, exist_ok=True)
            stored = {"settings": {}, "tables": {"weights": content}}
            (Path(out) / "results.json").write_text(json.dumps(stored))

        return study


@pytest.fixture
def fakes(monkeypatch, tmp_path):
    """A step that works, and others that fail, lack their data, or wait for these."""
    CALLS.clear()
    none = MissingData("no files")
    chosen = (
        Fake("mass", "p1", "mass", 1, error=RuntimeError("out of luck")),
        Fake("toy", "p1", "toy", 1),
        Fake(
            "mnist/runs", "p1", "bnn_research.populations.optunets", None, seeded=False, error=none
        ),
        Fake("mnist/mass", "p1", "mass", 1, smallest=None, seeded=False, after="mnist/runs"),
    )
    for module in (steps, command):
        monkeypatch.setattr(module, "STEPS", chosen)
    monkeypatch.chdir(tmp_path)


def test_a_step_that_fails_stops_no_other(fakes, capsys):
    command.reproduce("p1", seeds=2, out="out")
    printed, told = capsys.readouterr()
    assert CALLS == [("mass", 0), ("mass", 1), ("toy", 0), ("toy", 1), ("mnist/runs", 0)]
    found = {row[0]: row[3] for row in results("out")["tables"]["p1"]["rows"]}
    for claim, verdict in (
        ("less than 1 % of the runs have not converged (loss of the last epoch above 0.01)",
         "holds"),
        ("trained networks are far above their minimum mass (digits, by Adam)",
         "`mass` failed: RuntimeError: out of luck"),
        ("mass, minimum mass", "`mnist/mass` skipped: `mnist/runs` has not finished"),
    ):  # fmt: skip
        assert verdict in found[claim]
    assert "mnist/runs skipped: no files" in printed + told
    assert "0.505 ± 0.0071" in printed
    assert "fewer than 1 % in every run" in Path("out/README.md").read_text()


def test_what_has_finished_is_not_done_again(fakes, capsys, monkeypatch):
    def found(seeds):
        return evidence_in(Path("out").resolve(), seeds, "full")

    command.reproduce("toy", seeds=2, out="out")
    assert found(3).absent["toy"] == "`toy` has finished 2 of 3 seeds"
    command.reproduce("toy", seeds=3, out="out")
    assert CALLS == [("toy", 0), ("toy", 1), ("toy", 2)]
    assert len(found(3).of("toy")) == 3
    command.reproduce("toy,mass", seeds=1, out="out")
    assert CALLS[3:] == [("mass", 0)]
    command.reproduce(["toy"], seeds=1, out="out", again=True)
    assert CALLS[4:] == [("toy", 0)]
    monkeypatch.setattr(lightning_bnn, "__version__", "another")
    assert "has not been run" in found(1).absent["toy"]
    command.reproduce("toy", seeds=1, out="out")
    assert CALLS[5:] == [("toy", 0)]
    capsys.readouterr()
    for size in ("full", "smallest"):
        command.reproduce(list=True, size=size, out="out")
        assert ("mnist/mass" in capsys.readouterr().out) == (size == "full")
    assert len(CALLS) == 6


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
    out = tmp_path / "out"
    args = ["reproduce", "--size", "smallest", "--seeds", "1", "--out", str(out)]
    main(args)
    tables = results(out)["tables"]
    finished = {row[0] for row in tables["steps"]["rows"] if row[-1] == "finished"}
    assert finished == {step.name for step in STEPS if step.smallest is not None}
    verdicts = [row[3] for paper in ("p1", "p2", "p3") for row in tables[paper]["rows"]]
    assert sum(not verdict.startswith("not tested") for verdict in verdicts) > 25
    assert not any("failed" in verdict for verdict in verdicts)
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*.ckpt")}
    capsys.readouterr()
    main(args)
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*.ckpt")} == before
    assert "holds" in capsys.readouterr().out

"""The leaderboard: who is ranked, by what, and what became of those that are not."""

import math
from pathlib import Path

import pytest
from shell import failure
from small_runs import numbers, results

from bnn_research import leaderboard
from bnn_research.cli import main
from bnn_research.leaderboard import MethodScores, board_table, closest, rank_correlation

pytestmark = pytest.mark.filterwarnings("ignore")
NEAR, FAR = {"f_law": 0.1, "nll": 2.0, "acc": 0.5}, {"f_law": 0.2, "nll": 1.0, "acc": 0.6}


def board():
    return {
        "far": MethodScores([FAR, FAR]),
        "broken": MethodScores([], ["seed 0: it diverged.", "seed 1: it diverged."]),
        "near": MethodScores([NEAR], ["seed 1: no memory."]),
    }


@pytest.mark.parametrize("gold", [True, False])
def test_a_long_run_ranks_nothing(gold):
    """Beside gold the closest comes first; otherwise nothing is sorted, nor said to be."""
    table = board_table("concrete", 10, board(), gold)
    order = ["near", "far", "broken"] if gold else ["far", "broken", "near"]
    assert [row[0] for row in table.rows] == order
    assert ("ranks nothing" in table.title) is not gold
    assert ("Sorted by function law" in table.note) is gold


def test_what_failed_is_in_the_table_with_how_often():
    table = board_table("concrete", 10, board(), True)
    shown = {row[0]: dict(zip(table.header, row, strict=True)) for row in table.cells()}
    assert {name: of["failed"] for name, of in shown.items()} == {
        "near": "1 of 2", "far": "0 of 2", "broken": "2 of 2"
    }  # fmt: skip
    assert shown["broken"]["function law"] == shown["broken"]["NLL"] == "/"
    assert shown["near"]["function law"] == "10.00"
    assert "over the seeds that did not fail" in table.note


def test_what_has_no_distance_to_the_posterior_has_failed():
    outcome = MethodScores()
    for seed, distance in enumerate((0.1, math.nan, math.inf)):
        outcome.add(seed, {"f_law": distance, "rmse": 1e20})
    assert [row["f_law"] for row in outcome.numbers] == [0.1]
    assert [reason[:7] for reason in outcome.failures] == ["seed 1:", "seed 2:"]


def findings(monkeypatch, gold):
    monkeypatch.setattr(leaderboard, "is_gold", lambda name: name in gold)
    found = {(name, budget): board() for name in ("digits", "concrete") for budget in (10, 20)}
    return leaderboard._findings(found, leaderboard._Plan({}, 2, 4, Path("unused")))


def test_only_gold_compares_methods(monkeypatch, undrawn):
    found = findings(monkeypatch, ["digits"])
    boards = {"digits-10", "digits-20", "concrete-10", "concrete-20"}
    assert found.tables.keys() == {*boards, "correlations"}
    assert {row[0] for row in found.tables["correlations"].rows} == {"digits, 10", "digits, 20"}
    for figure in found.figures.values():
        titles = {axis.get_title() for axis in figure.axes}
        assert any("digits" in title for title in titles)
        assert not any("concrete" in title for title in titles)
    assert "digits, 20 gradients: near failed, seed 1: no memory." in found.cautions
    assert "concrete, 10 gradients: broken failed, seed 0: it diverged." in found.cautions
    without = findings(monkeypatch, [])
    assert (without.tables.keys(), without.figures) == (boards, {})


def test_rank_correlations_turn_signs_so_that_close_is_good():
    rows = [{"law": d, "nll": d**3, "acc": -d} for d in (1.0, 2.0, 3.0, 5.0)]
    assert rank_correlation(rows, "law", "nll") == pytest.approx(1)
    assert rank_correlation(rows, "law", "acc") == pytest.approx(1)
    turned = [{**row, "nll": -row["nll"]} for row in rows]
    assert rank_correlation(turned, "law", "nll") == pytest.approx(-1)
    assert math.isnan(rank_correlation([rows[0], rows[1], rows[1]], "law", "nll"))


def test_no_gold_reference_at_all_is_refused_in_one_sentence(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(leaderboard, "is_gold", lambda name: False)
    message = failure(capsys, "leaderboard", "--out", tmp_path / "out", script=main)
    assert "No reference is gold: name some as `--references`, of airfoil, concrete" in message


def test_settings_are_chosen_by_the_mean_distance_and_never_with_a_failure():
    near, far, lucky = ([{"f_law": d} for d in ds] for ds in ((0.2, 0.3), (0.4, 0.5), (0.1, 0.9)))
    assert closest([MethodScores(far), MethodScores(near), MethodScores(lucky)]) == 1
    assert closest([MethodScores(far), MethodScores(near, ["seed 100: no memory."])]) == 0
    assert closest([MethodScores([], ["diverged"]), MethodScores([], ["diverged"])]) == 0
    assert closest([MethodScores([{"f_law": math.nan}]), MethodScores(far)]) == 1


@pytest.fixture
def scored(tmp_path):
    """Score rows of a folder beside the two Gaussians."""
    sampler = "optimizer: {class_path: lightning_bnn.samplers.SGHMC, init_args: {lr: 1.0e+6}}"
    wild = f"# Wild\nmethod: SGHMC\nsettings:\n  members: 2\n  {sampler}\n"
    candidates = "candidates:\n  - settings: {optimizer: {init_args: {lr: 0.01}}}\n"
    tame = "# Tame\nmethod: DeepEnsemble\nsettings: {members: 2}\n"
    rows = {"tuned": wild.replace("Wild", "Tuned") + candidates, "wild": wild, "tame": tame}
    (tmp_path / "rows").mkdir()
    for name, text in rows.items():
        (tmp_path / "rows" / f"{name}.yaml").write_text(text)

    def scored(name, *more):
        out = tmp_path / name
        common = f"--references [two_gaussians] --rows {tmp_path / 'rows'} --samples 4 --seeds 1"
        main(["leaderboard", *common.split(), "--budgets", "[40]", "--out", str(out), *more])
        return out, {row["method"]: row for row in numbers(out, "two_gaussians-40")}

    return scored


@pytest.mark.e2e
def test_a_row_is_scored_with_the_settings_that_other_seeds_choose(scored):
    """A rate that diverges loses against one that does not, wherever it stands in the row."""
    out, found = scored("tuned", "--methods", "[tuned]", "--tuning", "1")
    (row,) = numbers(out, "settings")
    assert row["chosen"] == "settings.optimizer.init_args.lr 0.01"
    assert found["Tuned"]["failed"] == "0 of 1"


@pytest.mark.e2e
def test_a_method_that_diverges_is_told_of(scored, capsys):
    """Beside one that does not, and alone: a board of failures is a board, too."""
    out, found = scored("all", "--methods", "[wild, tame]")
    assert (found["Wild"]["failed"], found["Tame"]["failed"]) == ("1 of 1", "0 of 1")
    assert found["Wild"]["function law"] is None
    assert math.isfinite(found["Tame"]["function law"])
    (note,) = results(out)["cautions"]
    assert note.startswith("two_gaussians, 40 gradients: Wild failed, seed 0: ")
    assert note in capsys.readouterr().out
    _, found = scored("one", "--methods", "[tuned]", "--tuning", "0")
    assert found["Tuned"]["failed"] == "1 of 1"


@pytest.mark.slow
def test_approximations_of_the_posterior_are_nearer_to_it_than_trained_networks(tmp_path):
    nearest = {"SGHMC": 1, "Laplace": 2.5, "MFVI": 5}
    methods = [name.lower() for name in (*nearest, "Ensemble")]
    main(["leaderboard", "--references", "[digits]", "--budgets", "[1000]", "--seeds", "1",
          "--methods", f"[{', '.join(methods)}]", "--samples", "20",
          "--out", str(tmp_path / "board")])  # fmt: skip
    found = {row["method"]: row["NS law"] for row in numbers(tmp_path / "board", "digits-1000")}
    assert found.pop("Ensemble") > 6
    assert found.keys() == nearest.keys()
    assert all(law < nearest[name] for name, law in found.items())

"""All methods on the splits of a table as one stack: what they see, choose and score."""

import dataclasses
import os
from pathlib import Path

import fake_files
import numpy as np
import pytest
import torch
import yaml
from scipy.stats import norm
from shell import code_of, failure
from small_runs import results

from bnn_research import uci as study
from bnn_research.cli import main
from bnn_research.uci import (
    CONTESTANTS,
    TABLES,
    SplitTable,
    best_factor,
    choose_and_score,
    over_splits,
)
from bnn_research.uci_stacks import (
    Budget,
    Candidate,
    Predictions,
    ScaledMLP,
    fitted,
    read_splits,
    scores,
)

pytestmark = pytest.mark.filterwarnings("ignore")
SMALL = Budget(steps=12, batch_size=16, transitions=6, draws=8)
DATA = Path(os.environ.get("LIGHTNING_BNN_DATA", "data")) / "uci_splits"


def splits_of(folder, count=2, **options):
    fake_files.uci(folder, "yacht", splits=count, features=6, **options)
    return read_splits("yacht", str(folder))


# ------------------------------------------------------------ scores
def test_scores_are_those_of_a_gaussian_mixture_in_units_of_the_target():
    generator = torch.Generator().manual_seed(0)
    means, raw = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
    stds, targets = raw.exp(), means[0] + 0.5
    rmse, ll = scores(Predictions(means, stds, targets), 1.5, 20.0)
    y, mu, sigma = (20 * t.numpy() for t in (targets, means, 1.5 * stds))
    density = norm.pdf(y, mu, sigma).mean(0)
    assert rmse == pytest.approx(np.sqrt(((mu.mean(0) - y) ** 2).mean()))
    assert ll == pytest.approx(np.log(density).mean())
    assert scores(Predictions(means, stds, targets), 1.5, 1.0)[1] - ll == pytest.approx(np.log(20))
    assert ll != pytest.approx(norm.logpdf(y, mu, sigma).mean(), abs=0.01)  # not the mean of logs


def test_the_factor_of_the_noise_is_the_best_of_the_grid():
    errors = torch.randn(1, 4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = best_factor(Predictions(errors, torch.full_like(errors, 0.5), 0 * errors[0]))
    assert found == (2.0, pytest.approx(norm.logpdf(errors.numpy()).mean()))
    nothing = Predictions(errors * np.nan, errors, errors[0])  # of networks that have diverged
    assert best_factor(nothing) == (1.0, -np.inf)
    mean, error = over_splits([{"ll": 1.0}, {"ll": 2.0}, {"ll": 6.0}], "ll")
    assert (mean, error) == pytest.approx((3.0, np.std([1, 2, 6], ddof=1) / np.sqrt(3)))
    assert np.isnan(over_splits([{"ll": 1.0}, {"ll": np.nan}], "ll").value)


# ------------------------------------------------------------ networks and stacks
def test_the_scale_is_the_width_of_the_prior():
    net, x = ScaledMLP(3, 7), torch.randn(5, 3)
    plain = torch.nn.Sequential(torch.nn.Linear(3, 7), torch.nn.ReLU(), torch.nn.Linear(7, 1))
    with torch.no_grad():
        for layer, own, scale in ((plain[0], net.first, 3.0), (plain[2], net.last, 3 / 7**0.5)):
            layer.weight.copy_(scale * own.weight)
            layer.bias.copy_(scale * own.bias)
    outputs = net(x, torch.full((5, 1), 3.0))
    torch.testing.assert_close(outputs[:, :1], plain(x))
    assert (outputs[:, 1] == -2).all()
    assert not torch.allclose(net(x, torch.ones(5, 1))[:, :1], plain(x))


@pytest.mark.parametrize("name", ["map", "ensemble", "swag"])
def test_a_split_trains_beside_others_as_it_does_alone(tmp_path, name):
    candidates = [Candidate(s, w) for s in splits_of(tmp_path, 3) for w in (1.0, 2.0)]
    contestant = CONTESTANTS[name]
    together = fitted(contestant, None, candidates, 50, SMALL)
    alone = fitted(contestant, None, candidates[3:4], 50, SMALL)
    stacks = together.stack["first.weight"].split(contestant.members)
    own = alone.stack["first.weight"]
    torch.testing.assert_close(stacks[3], own, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(stacks[5], own, atol=1e-2)
    one, two = (
        trained.predict(k, candidates[3].split.test, 10).means
        for trained, k in ((together, 3), (alone, 0))
    )
    torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["map", "ensemble", "swag", "laplace"])
def test_a_split_has_the_same_scores_to_the_last_bit_alone(tmp_path, name):
    """Training makes tenths of a rounding error. (Methods with noise draw it for all splits.)"""
    splits = splits_of(tmp_path, 3)
    tables = [SplitTable("yacht", some, SMALL) for some in (splits[:1], splits)]
    alone, together = (choose_and_score(CONTESTANTS[name], table)[0] for table in tables)
    assert alone == together


def test_the_noise_of_no_method_is_at_the_end_of_its_grid():
    """Nothing that was chosen is a bound, so that a wider grid would choose the same."""
    low, high = min(study.FACTORS), max(study.FACTORS)
    errors = torch.randn(1, 4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for factor in (0.05, 0.2, 8.0):
        found, _ = best_factor(Predictions(factor * errors, torch.ones_like(errors), 0 * errors[0]))
        assert low < found < high
        assert found == pytest.approx(factor, rel=0.1)


@pytest.mark.parametrize("name", CONTESTANTS)
def test_every_method_scores_every_split(tmp_path, name):
    table = SplitTable("yacht", splits_of(tmp_path), SMALL)
    contestant = CONTESTANTS[name]
    few = dataclasses.replace(contestant, settings=contestant.settings[:1])
    rows = choose_and_score(few, table)
    assert [row["split"] for row in rows] == [0, 1]
    assert all(np.isfinite([row["rmse"], row["ll"], row["validation"]]).all() for row in rows)


def test_nothing_but_training_rows_decides_the_settings(tmp_path):
    def chosen(changed=None):
        root = tmp_path / str(changed)
        fake_files.uci(root, "yacht", splits=1, features=6)
        folder = root / "UCI_Datasets/yacht/data"
        if changed:
            data = np.loadtxt(folder / "data.txt")
            data[np.loadtxt(folder / f"index_{changed}_0.txt").astype(int)[:2]] *= 3
            np.savetxt(folder / "data.txt", data)
        table = SplitTable("yacht", read_splits("yacht", str(root)), SMALL)
        (row,) = choose_and_score(CONTESTANTS["map"], table)
        return {key: row[key] for key in ("settings", "factor", "validation")}, row["ll"]

    (settings, ll), (same, other_ll) = chosen(), chosen("test")
    assert same == settings
    assert other_ll != ll
    assert chosen("train")[0] != settings


def test_all_training_rows_are_learned_from_in_the_end(tmp_path):
    split = splits_of(tmp_path)[0]
    again = split.retrained()
    assert len(again.train[0]) == len(split.train[0]) + len(split.val[0])
    assert len(split.val[0]) == len(again.train[0]) // 5
    assert len(again.val[0]) == 0
    rows = {tuple(row) for row in again.train[0].tolist()}
    assert not rows & {tuple(row) for row in again.test[0].tolist()}


def call(root, out, *more):
    return code_of("uci", "--tables", "[yacht]", "--data", root, "--out", out,
                   "--methods", "[map, sghmc]", "--scale", "quick", *more, script=main)  # fmt: skip


@pytest.mark.e2e
def test_an_interrupted_command_ends_as_one_that_was_not(tmp_path, monkeypatch, capsys):
    splits_of(tmp_path)
    monkeypatch.setitem(study.SCALES, "quick", SMALL)
    assert call(tmp_path, tmp_path / "whole") == 0
    calls, made, broken = [], study.choose_and_score, tmp_path / "broken"

    def interrupted(contestant, table):
        calls.append(contestant.title)
        if calls == ["MAP", "SGHMC"]:
            raise KeyboardInterrupt
        return made(contestant, table)

    monkeypatch.setattr(study, "choose_and_score", interrupted)
    for _ in range(2):
        call(tmp_path, broken)
    assert calls == ["MAP", "SGHMC", "SGHMC"]
    assert results(tmp_path / "whole") == results(broken)
    assert len(results(broken)["settings"]["per_split"]["yacht/map"]) == 2
    assert "MC dropout (tuned)" in (broken / "README.md").read_text()
    (data,) = tmp_path.glob("**/yacht/data/data.txt")
    for path, change, again in (
        (data, lambda text: text, ["MAP", "SGHMC"]),  # other splits are run anew
        (broken / "runs/yacht-map.json", lambda text: text[:8], ["MAP"]),  # what is cut off, too
        (data, lambda text: text.replace("1", "2"), ["MAP", "SGHMC"]),  # and other data
    ):
        path.write_text(change(path.read_text()))
        done = len(calls)
        assert call(tmp_path, broken, "--splits", "1") == 0
        assert calls[done:] == again


@pytest.mark.bad_input
def test_mistakes_are_refused_in_a_sentence(tmp_path, capsys):
    out = ("--out", tmp_path / "out", "--data", tmp_path)
    assert "`methods` must be among map, " in failure(
        capsys, "uci", "--methods", "[magic]", *out, script=main
    )
    assert "`splits` must be" in failure(capsys, "uci", "--splits", "0", *out, script=main)
    splits_of(tmp_path / "there", count=2)
    there = ("--tables", "[yacht]", "--out", tmp_path / "out", "--data", tmp_path / "there")
    assert "at most 2 for yacht, got 3" in failure(
        capsys, "uci", "--splits", "3", *there, script=main
    )
    assert "yacht was not found in" in failure(
        capsys, "uci", "--tables", "[yacht]", *out, script=main
    )


def test_published_results_have_all_tables():
    text = (Path(study.__file__).parent / "uci_published.yaml").read_text(encoding="utf-8")
    for source in yaml.safe_load(text).values():
        assert set(source["rmse"]) == set(source["ll"]) == set(TABLES)


@pytest.mark.skipif(not (DATA / "yacht").is_dir(), reason="the published splits are not here")
def test_the_published_splits_are_read():
    splits = read_splits("yacht", str(DATA))
    assert len(splits) == 20
    assert {len(split.train[0]) + len(split.val[0]) for split in splits} == {277}

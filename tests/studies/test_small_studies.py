"""Every study at its smallest, on three networks where it takes some: what it writes and shows."""

import contextlib
import functools
import io
import math
import shutil

import pytest
import torch
from scipy.stats import chisquare, ks_2samp
from small_runs import NET, bank, config, numbers, results

from lightning_bnn import metrics as M
from lightning_bnn.cli import STUDIES, main
from lightning_bnn.datamodules import Digits
from lightning_bnn.evaluation.problem import read_problem
from lightning_bnn.posteriors import DiagonalGaussian
from lightning_bnn.studies.collapse import pearson
from lightning_bnn.studies.compact import CompactStudy
from lightning_bnn.studies.interpolation import (
    SCALES,
    exact_divergence,
    fitted_gaussians,
    midpoint_kl,
)
from lightning_bnn.studies.marginals import (
    argmax_p_value,
    clusters,
    exchange_p_values,
    explained_variance,
)
from lightning_bnn.studies.toy import forms_of
from lightning_bnn.studies.transpositions import permutation_with
from weightsym import discover, permute, random_permutations, transpositions
from weightsym import params as P

pytestmark = pytest.mark.filterwarnings("ignore")
EPOCHS = ["--epochs", "1"]
SMALLEST = {
    "demo": ["--size", "smallest"],
    "compare": ["--data", "like.yaml", "three", "--posteriors.A", "other"],
    "calibrate": ["three", "--data", "like.yaml"],
    "toy": None,
    "mass": ["--data", "like.yaml", "--networks", "three"],
    "collapse": ["--data", "like.yaml", "--networks", "three"],
    "permutations": ["--members", "3", *EPOCHS],
    "marginals": ["--data", "like.yaml", "--networks", "three"],
    "interpolation": None,
    "width": None,
    "transpositions": None,
    "compact": None,
    "tractable": None,
    "reproduce": None,
}
"""Arguments with which a study ends in seconds; None where tests of their own run it."""


LONGER = {"permutations"}
"""Those that take longer than a second or two."""


def filled(folder):
    config(folder)
    bank(folder / "three", 3, seed=1)
    bank(folder / "other", 3, seed=2)
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return filled(tmp_path)


def called(folder, args):
    """What a command prints that is called in a folder."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as text:
        patch.chdir(folder)
        main(args)
    return text.getvalue()


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A study at its smallest, once: the folder that it was called in, and what it printed."""

    @functools.cache
    def run(name):
        folder = filled(tmp_path_factory.mktemp(name))
        return folder, called(folder, [name, *SMALLEST[name], "--out", "out"])

    return run


def test_every_study_is_tried():
    assert SMALLEST.keys() == STUDIES.keys()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.e2e) if name in LONGER else name
        for name in SMALLEST
        if SMALLEST[name] is not None and name != "demo"
    ],
)
def test_tables_and_figures_are_printed_and_written(name, ran):
    folder, text = ran(name)
    held = results(folder / "out")
    assert held["study"] == name
    assert held["settings"]
    files = {p.name for p in (folder / "out").iterdir()}
    figures = {f.removesuffix(".png") for f in files if f.endswith(".png")}
    assert figures
    for figure in figures:
        assert f"{figure}.svg" in files
        assert (folder / "out" / f"{figure}.png").stat().st_size > 5_000
    for table, content in held["tables"].items():
        assert f"{table}.csv" in files
        assert content["title"] in text
        assert len(content["rows"]) >= 1
    assert str((folder / "out").resolve()) in text


# ------------------------------------------------------------ golden numbers on three networks
def test_mass_is_that_of_the_closed_form_for_two_layers(ran):
    rows = numbers(ran("mass")[0] / "out", "mass")
    networks = P.populate(NET, 3, torch.Generator().manual_seed(1))
    one, two = networks["1.weight"].double(), networks["3.weight"].double()
    masses = one.square().sum((1, 2)) + two.square().sum((1, 2))
    least = 2 * (one.norm(dim=2) * two.norm(dim=1)).sum(1)
    assert rows[0]["mean ± sd"] == pytest.approx(float(masses.mean()), rel=1e-6)
    assert rows[1]["mean ± sd"] == pytest.approx(float(least.mean()), rel=1e-6)
    excess = 100 * (masses / least - 1)
    assert rows[2]["median"] == pytest.approx(float(excess.median()), rel=1e-5)


def test_collapse_is_the_information_of_pairs(ran):
    row = numbers(ran("collapse")[0] / "out", "pairs")[0]
    networks = P.populate(NET, 3, torch.Generator().manual_seed(1))
    data = Digits()
    x = data.normalise(data.load().test[0])
    probs = P.apply(NET, networks, x).softmax(-1)
    pairs = [M.mutual_information(probs[[i, j]]).mean() for i, j in ((0, 1), (0, 2), (1, 2))]
    assert row["mean ± sd"] == pytest.approx(float(torch.stack(pairs).mean()), rel=1e-4)
    assert row["max"] == pytest.approx(float(max(pairs)), rel=1e-4)


def test_marginals_are_tested_as_by_scipy(ran):
    row = numbers(ran("marginals")[0] / "out", "equal")[0]
    networks = P.populate(NET, 3, torch.Generator().manual_seed(1))
    w = networks["1.weight"]
    p = [
        ks_2samp(w[:, 0, j].numpy(), w[:, k, j].numpy()).pvalue
        for k in range(1, 4)
        for j in range(64)
    ]
    assert row["KS p"] == pytest.approx(min(1, min(p) * len(p)))
    held = torch.bincount(w.amax(-1).argmax(1), minlength=4)
    assert row["largest weight: chi-square p"] == pytest.approx(chisquare(held.numpy()).pvalue)


# ------------------------------------------------------------ what studies rest on
def test_mantel_test_knows_that_pairs_share_networks():
    g = torch.Generator().manual_seed(0)
    upper = torch.triu_indices(20, 20, 1)
    own, noise = torch.randn(20, generator=g), torch.randn(190, generator=g)
    shared = (own[upper[0]] + own[upper[1]]).double()
    r, p = pearson(shared, shared + 0.1 * noise, 20)
    assert r > 0.95
    assert p == pytest.approx(0.001)
    other = torch.randn(20, generator=g)
    _, p = pearson(shared, (other[upper[0]] + other[upper[1]]).double(), 20)
    assert p > 0.02
    naive = torch.corrcoef(torch.stack([shared, shared + noise]))[0, 1]
    assert pearson(shared, shared + noise, 20)[0] == pytest.approx(float(naive), abs=1e-6)


def test_exchangeable_units_pass_and_sorted_units_fail():
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(300, 6, 4, generator=g)
    p = exchange_p_values(rows)
    assert p.shape == (5, 4)
    assert p.min() * p.numel() > 0.01
    assert argmax_p_value(rows) > 0.01
    order = rows.amax(-1).argsort(1, descending=True)
    ordered = rows.gather(1, order[..., None].expand_as(rows))
    assert exchange_p_values(ordered).min() < 1e-10
    assert argmax_p_value(ordered) < 1e-10


def test_explained_variance_of_a_plane():
    g = torch.Generator().manual_seed(0)
    plane = torch.randn(50, 2, generator=g) @ torch.randn(2, 9, generator=g)
    share = explained_variance({"w": plane})
    assert float(share.sum()) == pytest.approx(1)
    assert float(share[:2].sum()) == pytest.approx(1)
    assert float(share[0]) < 1


def test_mean_shift_finds_clusters_where_there_are_some():
    g = torch.Generator().manual_seed(0)
    centres = torch.tensor([[0.0, 0.0], [30.0, 0.0], [0.0, 30.0], [30.0, 30.0]])
    rows = centres.repeat_interleave(torch.tensor([40, 20, 20, 20]), 0)
    assert clusters({"w": rows + torch.randn(100, 2, generator=g)}) == (4, 40.0)
    assert clusters({"w": torch.randn(100, 2, generator=g)})[1] > 60


@pytest.mark.parametrize(("alpha", "variance", "kl"), [
    (2.0, 1.9425, 0.010888), (3.0, 2.9378, 0.074234), (4.0, 4.1903, 0.226504),
])  # fmt: skip
def test_golden_gaussians_between_two_modes(alpha, variance, kl):
    found = midpoint_kl(alpha)
    assert found == pytest.approx((variance, kl), abs=6e-5)


def test_divergence_against_samples():
    g = torch.Generator().manual_seed(0)
    mean, log_std = torch.tensor([1.0, 0.3]).double(), torch.tensor([0.2, -0.1]).double()
    far = torch.tensor(3.0).double()
    z = mean + log_std.exp() * torch.randn(400_000, 2, generator=g).double()
    q = torch.distributions.Normal(mean, log_std.exp()).log_prob(z).sum(-1)
    centres = torch.tensor([[0.0, 0.0], [3.0, 0.0]]).double()
    p = torch.distributions.Normal(centres[:, None], torch.ones(2).double()).log_prob(z).sum(-1)
    wanted = (q - (p.logsumexp(0) - math.log(2))).mean()
    assert float(exact_divergence(mean, log_std, far)) == pytest.approx(float(wanted), abs=0.01)


def test_a_gaussian_stays_on_its_mode_only_if_the_other_is_far():
    import dataclasses

    settings = dataclasses.replace(
        SCALES["small"], points=11, sigmas=(1.0, 2.0), samples=60, steps=700
    )
    found = fitted_gaussians(3, settings, seed=0)
    one, two = found.measure
    assert one[1:5] == pytest.approx(0.5, abs=0.05)
    assert one[5:].max() < 0.1
    assert two[1:10] == pytest.approx(0.5, abs=0.05)
    assert float(found.kl[0, 3]) == pytest.approx(0.074234, abs=0.01)
    assert float(found.kl[0, -1]) == pytest.approx(math.log(2), abs=0.02)


@pytest.mark.parametrize("swaps", [0, 1, 5, 11])
def test_permutations_with_so_many_swaps(swaps):
    g = torch.Generator().manual_seed(swaps)
    found = torch.stack([permutation_with(swaps, 12, g) for _ in range(50)])
    assert (found.sort(1).values == torch.arange(12)).all()
    assert (transpositions(found) == swaps).all()
    assert len(found.unique(dim=0)) > (1 if swaps else 0)


def test_toy_forms_keep_the_function_and_order_the_last_layer():
    from lightning_bnn.models import mlp

    net = mlp(2, [2], 1)
    networks, x = P.populate(net, 50), torch.randn(20, 2)
    forms = forms_of(networks, discover(net, x[:2]))
    wanted = P.apply(net, networks, x)
    for stack in forms.values():
        torch.testing.assert_close(P.apply(net, stack, x), wanted, rtol=1e-3, atol=1e-4)
    ordered = forms["scaled and ordered"]
    torch.testing.assert_close(ordered["1.weight"].norm(dim=2), torch.full((50, 2), 3.0))
    assert (ordered["3.weight"][:, 0, 0] <= ordered["3.weight"][:, 0, 1]).all()


@pytest.mark.e2e
def test_permutations_are_followed_step_by_step(ran):
    held = torch.load(ran("permutations")[0] / "out" / "history_max.pt")
    assert held["tau"].shape == (17, 2, 3)
    assert held["layers"] == ["1.weight", "3.weight"]
    assert (held["tau"] <= 1).all()


@pytest.mark.e2e
def test_width_shows_both_objectives(here):
    args = ["--widths", "[3, 4]", "--draws", "[2]", "--members", "2", *EPOCHS, "--out", "out"]
    main(["width", *args])
    plain, symmetrized = numbers("out", "elbo"), numbers("out", "symmetrized")
    assert [row[""] for row in plain] == ["MFVI", "SGM, K=2", "ours"]
    for below, above in zip(plain, symmetrized, strict=True):
        for column in ("3 units", "4 units"):
            assert 0 <= above[column] - below[column] <= math.log(24) / 1078 + 1e-6


@pytest.mark.e2e
def test_transpositions_recover_the_swaps_between_copies(here):
    main(["transpositions", "--hidden", "8", "--points", "3", "--epochs", "3", "--out", "out"])
    for row in numbers("out", "sweep"):
        assert int(row["swaps at the start"]) == row["swaps after"]
        assert row["matched distance"] < row["distance"]


@pytest.mark.e2e
def test_a_population_is_trained_once(here, capsys):
    args = ["mass", "--members", "4", *EPOCHS, "--out", "out"]
    main(args)
    first = numbers("out", "mass")
    files = {p: p.stat().st_mtime for p in (here / "out").rglob("*.ckpt")}
    main(args)
    assert numbers("out", "mass") == first
    assert {p: p.stat().st_mtime for p in (here / "out").rglob("*.ckpt")} == files
    main(["mass", "--members", "5", *EPOCHS, "--out", "out"])
    assert "Mass of 5 networks" in capsys.readouterr().out


@pytest.mark.e2e
def test_a_study_that_was_killed_after_its_last_epoch_is_completed(ran, tmp_path):
    name = "permutations"
    folder = shutil.copytree(ran(name)[0], tmp_path / name)
    first = results(folder / "out")["tables"]
    for path in [*(folder / "out").rglob("finished"), *(folder / "out").glob("*.pt")]:
        path.unlink()
    called(folder, [name, *SMALLEST[name], "--out", "out"])
    assert results(folder / "out")["tables"] == first


def test_deviations_of_another_posterior_follow_its_means(here):
    study = CompactStudy(read_problem(here / "like.yaml"), batches=3, draws=10, seed=0)
    g = torch.Generator().manual_seed(3)
    std = {name: 0.1 + torch.rand(t.shape, generator=g) for name, t in P.of(NET).items()}
    mine, move = DiagonalGaussian(P.of(NET), 0.5), random_permutations(study.symmetries, g)
    other = DiagonalGaussian(*(permute(part, study.symmetries, move) for part in (P.of(NET), std)))
    both = study.mixed(mine, other)
    assert torch.equal(both.mean, mine.mean)
    for name, t in both.deviations.items():
        torch.testing.assert_close(t, std[name])


@pytest.mark.e2e
def test_compact_representations_of_permuted_networks(here):
    """Copies of one network in other orders: matched they are it, as they are they are nothing."""
    problem = read_problem(here / "like.yaml")
    study = CompactStudy(problem, batches=3, draws=10, seed=0)
    g = torch.Generator().manual_seed(0)
    sharp = {name: 8 * t for name, t in P.of(NET).items()}
    noisy = DiagonalGaussian(sharp, 1e-3).sample(8, g)
    noisy = {name: t.detach() for name, t in noisy.items()}
    moves = [torch.stack([torch.randperm(4, generator=g) for _ in range(8)])]
    stack = permute(noisy, study.symmetries, moves)
    found = study.findings({"HMC": stack, "Ensemble": stack}, DiagonalGaussian(sharp), [])
    rows = {row[0]: row for row in found.tables["table1"].rows}
    for name in ("HMC", "Ensemble"):
        assert rows[f"{name} q_r"][3] > 0.97
        assert rows[f"{name} q_d"][3] < 0.9
        assert rows[f"{name} q_r"][4] < 0.01 < rows[f"{name} q_d"][4]
    assert rows["HMC networks"][3:] == [1.0, pytest.approx(0.0, abs=1e-12)]
    sets = list(study.drawn(DiagonalGaussian.fit(stack), "HMC q_d"))
    accuracies = torch.tensor([study.accuracy(drawn) for drawn in sets])
    assert rows["HMC q_d"][1] == pytest.approx(float(accuracies.mean()))
    assert accuracies.std() > 0
    pruned = {row[0]: row[1:] for row in found.tables["pruning"].rows}
    jointly = {row[0]: row[1:] for row in found.tables["pruning_joint"].rows}
    whole = study.accuracy(sharp)
    assert pruned["one network, deviations of HMC"][0] == pytest.approx(whole, abs=3)
    assert jointly["HMC q_r joint, own deviations"][0] == pytest.approx(whole, abs=3)
    assert {name.replace(" joint", "") for name in jointly} == pruned.keys()

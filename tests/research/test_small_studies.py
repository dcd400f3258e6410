"""Every study at its smallest, on three networks where it takes some: what it writes and shows."""

import dataclasses
import functools
import math
import shutil

import numpy as np
import pytest
import torch
from scipy.stats import chisquare, ks_2samp
from shell import failure
from small_runs import NET, assert_published, called, filled, numbers, results

from bnn_research.cli import STUDIES, main
from bnn_research.compact import CompactStudy
from bnn_research.interpolation import SCALES, exact_divergence, fitted_gaussians, midpoint_kl
from bnn_research.marginals import argmax_p_value, clusters, exchange_p_values, explained_variance
from bnn_research.toy import forms_of
from bnn_research.tractable import posterior_density, study
from bnn_research.transpositions import permutation_with
from lightning_bnn import metrics as M
from lightning_bnn.datamodules import Digits
from lightning_bnn.evaluation.populations import pearson
from lightning_bnn.evaluation.problem import read_problem
from lightning_bnn.models import mlp
from lightning_bnn.posteriors import DiagonalGaussian
from weightsym import discover, permute, random_permutations, transpositions
from weightsym import params as P

pytestmark = pytest.mark.filterwarnings("ignore")
EPOCHS = ["--epochs", "1"]
SMALLEST = {
    "mass": ["--data", "like.yaml", "--networks", "three"],
    "collapse": ["--data", "like.yaml", "--networks", "three"],
    "permutations": ["--members", "3", *EPOCHS],
    "marginals": ["--data", "like.yaml", "--networks", "three"],
}
"""Arguments with which a study ends in seconds."""
OTHERS = "toy interpolation width transpositions compact tractable reproduce"
"""Those that tests of their own run."""
RUN = [
    pytest.param(name, marks=[pytest.mark.e2e] if name == "permutations" else [])
    for name in SMALLEST
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return filled(tmp_path)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A study at its smallest, once: the folder that it was called in, and what it printed."""

    @functools.cache
    def run(name):
        folder = filled(tmp_path_factory.mktemp(name))
        return folder, called(main, folder, [name, *SMALLEST[name], "--out", "out"])

    return run


@pytest.mark.parametrize("name", RUN)
def test_tables_and_figures_are_printed_and_written(name, ran):
    assert STUDIES.keys() == {*SMALLEST, *OTHERS.split()}
    folder, text = ran(name)
    assert_published(folder / "out", name, text)


# ------------------------------------------------------------ golden numbers on three networks
NETWORKS = P.populate(NET, 3, torch.Generator().manual_seed(1))


def test_mass_is_that_of_the_closed_form_for_two_layers(ran):
    mass, minimum, excess = numbers(ran("mass")[0] / "out", "mass")[:3]
    one, two = NETWORKS["1.weight"].double(), NETWORKS["3.weight"].double()
    masses = one.square().sum((1, 2)) + two.square().sum((1, 2))
    least = 2 * (one.norm(dim=2) * two.norm(dim=1)).sum(1)
    assert mass["mean ± sd"] == pytest.approx(float(masses.mean()), rel=1e-6)
    assert minimum["mean ± sd"] == pytest.approx(float(least.mean()), rel=1e-6)
    wanted = 100 * float((masses / least - 1).median())
    assert excess["median"] == pytest.approx(wanted, rel=1e-5)


def test_collapse_is_the_information_of_pairs(ran):
    row, data = numbers(ran("collapse")[0] / "out", "pairs")[0], Digits()
    probs = P.apply(NET, NETWORKS, data.normalise(data.load().test[0])).softmax(-1)
    pairs = [M.mutual_information(probs[[i, j]]).mean() for i, j in ((0, 1), (0, 2), (1, 2))]
    assert row["mean ± sd"] == pytest.approx(float(torch.stack(pairs).mean()), rel=1e-4)
    assert row["max"] == pytest.approx(float(max(pairs)), rel=1e-4)


def test_marginals_are_tested_as_by_scipy(ran):
    row, w = numbers(ran("marginals")[0] / "out", "equal")[0], NETWORKS["1.weight"].numpy()
    p = [ks_2samp(w[:, 0], w[:, k]).pvalue.min() for k in range(1, 4)]
    assert row["KS p"] == pytest.approx(min(1, min(p) * 3 * 64))
    held = np.bincount(w.max(-1).argmax(1), minlength=4)
    assert row["largest weight: chi-square p"] == pytest.approx(chisquare(held).pvalue)


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
    share = explained_variance({"w": torch.randn(50, 2) @ torch.randn(2, 9)})
    assert [float(share.sum()), float(share[:2].sum())] == pytest.approx([1, 1])
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
    mean, std = torch.tensor([1.0, 0.3]).double(), torch.tensor([1.2, 0.9]).double()
    q = torch.distributions.Normal(mean, std)
    z, far = q.sample((400_000,)), torch.tensor(3.0).double()
    centres = torch.tensor([[[0.0, 0.0]], [[3.0, 0.0]]]).double()
    p = torch.distributions.Normal(centres, 1.0).log_prob(z).sum(-1)
    wanted = (q.log_prob(z).sum(-1) - (p.logsumexp(0) - math.log(2))).mean()
    found = exact_divergence(mean, std.log(), far)
    assert float(found) == pytest.approx(float(wanted), abs=0.01)


def test_a_gaussian_stays_on_its_mode_only_if_the_other_is_far():
    few = {"points": 11, "sigmas": (1.0, 2.0), "samples": 60, "steps": 700}
    found = fitted_gaussians(3, dataclasses.replace(SCALES["small"], **few), seed=0)
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
    net = mlp(2, [2], 1)
    networks, x = P.populate(net, 50), torch.randn(20, 2)
    forms, wanted = forms_of(networks, discover(net, x[:2])), P.apply(net, networks, x)
    for stack in forms.values():
        torch.testing.assert_close(P.apply(net, stack, x), wanted, rtol=1e-3, atol=1e-4)
    ordered = forms["scaled and ordered"]
    torch.testing.assert_close(ordered["1.weight"].norm(dim=2), torch.full((50, 2), 3.0))
    assert (ordered["3.weight"][:, 0, 0] <= ordered["3.weight"][:, 0, 1]).all()


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
    """Permutations, followed step by step."""
    name = "permutations"
    folder = shutil.copytree(ran(name)[0], tmp_path / name)
    first, held = results(folder / "out")["tables"], torch.load(folder / "out" / "history_max.pt")
    assert held["tau"].shape == (17, 2, 3)
    assert held["layers"] == ["1.weight", "3.weight"]
    assert (held["tau"] <= 1).all()
    for path in [*(folder / "out").rglob("finished"), *(folder / "out").glob("*.pt")]:
        path.unlink()
    called(main, folder, [name, *SMALLEST[name], "--out", "out"])
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
    study = CompactStudy(read_problem(here / "like.yaml"), batches=3, draws=10, seed=0)
    g, sharp = torch.Generator().manual_seed(0), {name: 8 * t for name, t in P.of(NET).items()}
    noisy = DiagonalGaussian(sharp, 1e-3).sample(8, g)
    moves = [torch.stack([torch.randperm(4, generator=g) for _ in range(8)])]
    stack = permute({name: t.detach() for name, t in noisy.items()}, study.symmetries, moves)
    found = study.findings({"HMC": stack, "Ensemble": stack}, DiagonalGaussian(sharp), [])
    rows, pruned, jointly = (
        {row[0]: row for row in found.tables[name].rows}
        for name in ("table1", "pruning", "pruning_joint")
    )
    for name in ("HMC", "Ensemble"):
        assert rows[f"{name} q_r"][3] > 0.97
        assert rows[f"{name} q_d"][3] < 0.9
        assert rows[f"{name} q_r"][4] < 0.01 < rows[f"{name} q_d"][4]
    assert rows["HMC networks"][3:] == [1.0, pytest.approx(0.0, abs=1e-12)]
    sets = list(study.drawn(DiagonalGaussian.fit(stack), "HMC q_d"))
    accuracies = torch.tensor([study.accuracy(drawn) for drawn in sets])
    assert rows["HMC q_d"][1] == pytest.approx(float(accuracies.mean()))
    assert accuracies.std() > 0
    whole = pytest.approx(study.accuracy(sharp), abs=3)
    assert pruned["one network, deviations of HMC"][1] == whole
    assert jointly["HMC q_r joint, own deviations"][1] == whole
    assert {name.replace(" joint", "") for name in jointly} == pruned.keys()


# ------------------------------------------------------------ two ReLU units
@pytest.mark.e2e
def test_tables_2_and_3():
    """Mean field lies between the modes and symmetrized on one, with a higher ELBO."""
    found = study([0.05, 0.1], seeds=5, epochs=10, noise=1.5)
    results = {(r.alpha, r.method): r for r in found}
    methods = "MFVI", "symmetrized, K=2", "symmetrized, exact"
    one, two, exact = (results[0.05, m].apart.mean() for m in methods)
    assert one < 0.45 < two < exact
    assert exact == pytest.approx(1, abs=0.25)
    for result in results.values():
        assert result.alpha < 0.1 or result.apart.mean() > 0.85
        assert (result.exact >= result.elbo).all()
        assert (result.exact - result.elbo <= math.log(2) / 100 + 1e-6).all()
        torch.testing.assert_close(result.drawn, result.exact, atol=2e-3, rtol=0)
    for alpha in (0.05, 0.1):
        mfvi, drawn, exact = (results[alpha, m].exact.mean() for m in methods)
        assert mfvi < drawn < exact + 1e-5
        assert results[alpha, methods[1]].mse.mean() < results[alpha, "MFVI"].mse.mean()


def test_the_modes_of_the_posterior_are_where_they_should_be():
    axis, density = posterior_density(0.2, 1.0)
    i, j = divmod(int(density.argmax()), len(axis))
    assert sorted([axis[i].item(), axis[j].item()]) == pytest.approx([-0.2, 0.2], abs=0.01)
    torch.testing.assert_close(density, density.T)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ("--out /proc/nothing", "`out` must be a writable folder"),
        ("--noise 0", "`noise` must be above 0"),
        ("--alphas [-0.1]", "`alphas` must be above 0"),
    ],
)
def test_bad_arguments(args, sentence, capsys):
    assert sentence in failure(capsys, "tractable", *args.split(), script=main)

"""`lightning_bnn.compare` and `Posterior.of`: from Python, whatever holds the networks."""

import copy
import math

import pytest
import torch
from laplace import Laplace
from small_runs import NET, bank, config, numbers
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_bnn
from lightning_bnn import metrics as M
from lightning_bnn.bank import CheckpointBank
from lightning_bnn.calibration import calibrated
from lightning_bnn.cli import main
from lightning_bnn.datamodules import Diabetes, Digits
from lightning_bnn.doctor import Examples, examine
from lightning_bnn.evaluation import predictions_of_mode
from lightning_bnn.likelihoods import Categorical, Gaussian
from lightning_bnn.metrics import law_mmd, mmd
from lightning_bnn.models import mlp
from lightning_bnn.modules import SWAG, DeepEnsemble
from lightning_bnn.posteriors import DiagonalGaussian, Empirical, Posterior
from weightsym import params as P

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("undrawn")]


def stack(count, seed):
    return P.populate(NET, count, torch.Generator().manual_seed(seed))


def listed(networks):
    """The networks of a stack as modules."""
    modules = []
    for one in P.unstack(networks):
        module = copy.deepcopy(NET)
        module.load_state_dict(one)
        modules.append(module)
    return modules


@pytest.fixture(scope="module")
def compared(undrawn):
    """The same five networks as everything that can hold them, and as draws of one posterior."""
    five = stack(5, seed=2)
    rows = torch.stack([nn.utils.parameters_to_vector(m.parameters()) for m in listed(five)])
    trained = DeepEnsemble(NET, members=5)
    trained.load_state_dict({f"state.networks.{n}": t for n, t in five.items()}, strict=False)
    sources = {
        "stack": five,
        "modules": listed(five),
        "list": nn.ModuleList(listed(five)),
        "dicts": P.unstack(five),
        "posterior": Empirical(five),
        "vectors": Posterior.of(rows.detach(), NET),
        "trained": trained,
        "draws": Posterior.of(listed(five), draws=True),
    }
    return lightning_bnn.compare(stack(12, seed=1), sources, Digits(), network=NET)


def rows_of(findings, table):
    names = findings.tables[table].header
    return [dict(zip(names, row, strict=True)) for row in findings.tables[table].rows]


def test_what_holds_the_networks_changes_no_number(compared):
    first, *others, draws, _ = rows_of(compared, "distances")
    for other in others:
        for name in first.keys() - {"method"}:  # what all share was summed in another order
            known, cell = (
                [v] if not isinstance(v, tuple) else v for v in (first[name], other[name])
            )
            assert tuple(cell) == pytest.approx(tuple(known), rel=1e-12, nan_ok=True), name
    assert len(others) == 6
    assert first["modes"] == 5
    law = law_mmd(stack(12, seed=1), stack(5, seed=2), None)
    assert first["law"].value == pytest.approx(100 * float(law.value))
    assert (draws["modes"], draws["networks"]) == (1, 5)  # draws of one posterior are one mode
    assert math.isnan(draws["law"].value)
    (caution,) = compared.cautions
    assert caution.startswith("draws: one mode")


def test_the_command_calls_the_same_function(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config(tmp_path)
    reference, networks = bank("ref", 6, seed=1), bank("a", 3, seed=2)
    main(["compare", "ref", "--posteriors.A", "a", "--data", "like.yaml", "--out", "out"])
    here = lightning_bnn.compare(reference, {"A": networks}, Digits(), network=NET)
    there = lightning_bnn.compare("ref", {"A": CheckpointBank("a", "r")}, "like.yaml")
    for name in ("distances", "predictions", "calibrated"):
        (written, *_), (row, *_) = numbers("out", name), rows_of(here, name)
        assert {k: getattr(v, "value", v) for k, v in row.items()} == pytest.approx(
            {k: float("nan") if v is None else v for k, v in written.items()}, nan_ok=True
        )
        assert repr(rows_of(there, name)) == repr(rows_of(here, name))


def test_a_fitted_laplace_is_one_posterior():
    torch.manual_seed(0)
    network, x, y = mlp(4, [5], 3), torch.randn(120, 4), torch.randint(3, (120,))
    loader = DataLoader(TensorDataset(x, y), 40)
    for part, names in (("all", ["1.weight", "3.weight"]), ("last_layer", ["3.weight"])):
        fitted = Laplace(copy.deepcopy(network), "classification", part, hessian_structure="diag")
        fitted.fit(loader)
        posterior = Posterior.of(fitted)
        assert len(posterior.modes()) == 1
        draws = posterior.sample(400, torch.Generator().manual_seed(1))
        again = posterior.sample(400, torch.Generator().manual_seed(1))
        assert all(torch.equal(t, again[name]) for name, t in draws.items())
        moved = {name for name, t in draws.items() if float(t.std(0).max()) > 1e-6}
        assert moved & {"1.weight", "3.weight"} == set(names)
        exact = fitted.posterior_variance[-3:].sqrt()  # of the last bias
        assert torch.allclose(draws["3.bias"].std(0), exact, rtol=0.15)
    assert torch.equal(draws["1.weight"][0], network[1].weight)
    findings = lightning_bnn.compare(
        [mlp(4, [5], 3) for _ in range(6)], {"L": fitted}, (x, y), network=network
    )
    assert rows_of(findings, "distances")[0]["modes"] == 1


def test_lists_of_modules_are_stacks():
    first, second = stack(5, seed=1), stack(4, seed=2)
    assert float(mmd(listed(first), listed(second))) == float(mmd(first, second))
    assert Empirical(listed(first)).size == 5
    assert P.stack(first) is first
    examples = Examples((torch.randn(40, 1, 8, 8),), torch.randint(10, (40,)))
    report = examine(listed(first), likelihood=Categorical(), held_out=examples)
    assert report.facts["modes"] == 5
    assert report.names() == examine(Empirical(first), network=NET, held_out=examples).names()


def test_advice_names_the_best_and_what_is_level_with_it(compared):
    advice = {row["if you need"]: row for row in rows_of(compared, "advice")}
    assert advice["the right class"]["take"] == "stack"
    assert advice["probabilities to act on"]["level with it"] == "all others"


def test_a_clear_winner_stands_alone():
    """Of networks around the one that has made the labels, and of some that know nothing."""
    x = torch.randn(500, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    sharp = {n: 5 * t for n, t in P.of(NET).items()}
    near = DiagonalGaussian(sharp, 0.01).sample(3, torch.Generator().manual_seed(0))
    known = {"not": stack(3, seed=5), "yes": listed({n: t.detach() for n, t in near.items()})}
    data = x, NET(x).argmax(1)
    found = lightning_bnn.compare(stack(6, seed=3), known, data, network=NET)
    advice = {row["if you need"]: row for row in rows_of(found, "advice")}
    assert advice["the right class"]["take"] == "yes"
    assert advice["probabilities to act on"]["level with it"] == "none"


def test_cautions_say_what_numbers_cannot_carry():
    x, y = torch.randn(15, 1, 8, 8), torch.randint(10, (15,))
    few = lightning_bnn.compare(stack(3, seed=1), {"two": stack(2, seed=2)}, (x, y), network=NET)
    words = " ".join(few.cautions)
    assert "two: two modes have no error" in words
    assert "15 test examples are too few" in words
    assert "A reference of 3 networks has no noise floor" in words


def test_numbers_of_a_regression_are_those_computed_by_hand():
    net, likelihood, data = mlp(10, [3], 2).eval(), Gaussian("heteroscedastic"), Diabetes()
    reference, ensemble = (P.populate(net, n, torch.Generator().manual_seed(n)) for n in (6, 4))
    arguments = {"network": net, "likelihood": likelihood}
    found = lightning_bnn.compare(reference, {"E": ensemble}, data, **arguments)
    _, row = rows_of(found, "predictions")
    row |= rows_of(found, "distances")[0]
    x, y = data.load().test
    (m, s), (n, t) = (
        likelihood.moments(P.apply(net, stack, x).detach().double())
        for stack in (ensemble, reference)
    )
    rmse = (m.mean(0) - y).square().mean().sqrt()
    wanted = {
        "RMSE": rmse, "RMSE (unit)": rmse * data.target_std[0], "CRPS": M.crps(m, s, y),
        "NLL": M.mixture_nll(m, s, y).mean(), "Cover90": 100 * M.interval_coverage(m, s, y),
        "Width90": M.interval_width(m, s), "Calib": 100 * M.quantile_calibration(m, s, y),
        "Sharpness": M.sharpness(m, s), "Energy": M.energy_distance(m, s, n, t),
        "Energy (f)": M.energy_distance(m, 0 * s, n, 0 * t),
    }  # fmt: skip
    for name, value in wanted.items():
        assert row[name].value == pytest.approx(float(value), rel=1e-5), name
    assert "Acc" not in row
    assert "a perfect forecaster has 3.1" in found.tables["predictions"].note


def test_a_result_shows_itself(compared):
    page = compared._repr_html_()
    assert page.count("<table>") == page.count("</table>") == len(compared.tables)
    assert all(text in repr(compared) for text in compared.cautions)
    assert "metrics" in compared.figures


NAN = [{n: torch.full_like(t, torch.nan) for n, t in one.items()} for one in P.unstack(stack(3, 3))]


def test_texts_are_compared_by_the_likelihood_of_whole_texts():
    net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3))
    ours, theirs = (P.populate(net, 4, torch.Generator().manual_seed(k)) for k in (1, 2))
    x = torch.randint(5, (30, 6), generator=torch.Generator().manual_seed(0))
    y = (x % 3).where(x > 0, -100)
    likelihood = Categorical(ignore_index=-100)
    data = {"test": (x, y), "other": (x.flip(1), y)}
    arguments = {"network": net, "likelihood": likelihood}
    found = lightning_bnn.compare(theirs, {"A": Posterior.of(ours, draws=True)}, data, **arguments)
    (row,) = rows_of(found, "predictions")
    assert found.settings["ood_set"] == "other"  # all sets but the first
    logs = likelihood.log_prob(P.apply(net, ours, x), y).double()
    assert row["NLL"].value == pytest.approx(-(logs.logsumexp(0) - math.log(4)).mean().item())
    ragged = [(x[:4], y[:4]), (x[4:, :5], y[4:, :5])]
    with pytest.raises(ValueError, match="targets of batches have different lengths: pad all"):
        lightning_bnn.compare(theirs, {"A": ours}, ragged, **arguments)
    named = [{"input_ids": x, "labels": y}]
    with pytest.raises(ValueError, match=r"must be \(inputs, targets\) for .*, got a dict"):
        lightning_bnn.compare(theirs, {"A": ours}, named, **arguments)
    ((predicted,),) = predictions_of_mode(Empirical(ours), net, likelihood, [[(x, y)]], (4,), 0)
    with pytest.raises(ValueError, match="Classes at several positions are not calibrated"):
        calibrated(predicted)


IMAGES = torch.randn(20, 1, 8, 8), torch.randint(10, (20,))


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"posteriors": {}}, "`posteriors` must map names to posteriors, .*, got none"),
        ({"posteriors": [NET]}, "`posteriors` must map names to posteriors, .*, got a list"),
        ({"posteriors": {"A": []}}, "Every posterior failed: `networks` must hold at least one"),
        ({"posteriors": {"A": NAN}}, "Every posterior failed: .* holds NaN or infinite weights"),
        ({"posteriors": {"A": NET}}, "or a list of networks, got one Sequential"),
        (
            {"posteriors": {"A": [NET, mlp(64, [5], 10)]}},
            r"`networks\[1\]` differs from the first network: '1.weight' has shape .5, 64.",
        ),
        ({"posteriors": {"A": [NET, nn.Linear(1, 2)]}}, r"`networks\[1\]` has different names"),
        ({"posteriors": {"A": [mlp(64, [5], 10)]}}, "not of this network: .1.bias. is"),
        ({"posteriors": {"A": [NET, "b"]}}, r"`networks\[1\]` must be a module or a dict"),
        ({"posteriors": {"A": torch.ones(3, 7)}}, "Draws of 7 weights do not fit the network"),
        ({"posteriors": {"A": torch.ones(3)}}, "Draws must be a matrix .*, got shape .3,."),
        ({"posteriors": {"A": "nowhere"}}, "There is nothing at nowhere"),
        ({"posteriors": {"A": str(__file__)}}, "Every posterior failed"),
        ({"reference": []}, "`networks` must hold at least one network"),
        ({"reference": [NET]}, "`reference` must hold at least 2 networks, got 1"),
        ({"reference": NAN}, "holds NaN or infinite values"),
        ({"data": None}, "pass `data`, a configuration .*, or, in Python, test data"),
        ({"data": [(*IMAGES, IMAGES[1])]}, r"Batches must be \(inputs, targets\) .* a tuple of 3"),
        ({"data": 3}, "`data` must be a datamodule, a loader, .*, got int"),
        ({"data": (IMAGES[0], IMAGES[1][:5])}, "`data` has 20 inputs, but 5 targets"),
        ({"data": (IMAGES[0][..., :4], IMAGES[1])}, "`data` do not fit the network: mat1 and mat2"),
        ({"data": (IMAGES[0], IMAGES[1] / 2)}, "`data` do not fit the network: `targets` must be"),
        ({"data": []}, "`data` do not fit the network: there are no examples"),
        ({"data": "none.yaml"}, "none.yaml must be a configuration"),
        ({"protocol": "p2"}, "`protocol` must be one of full, p1, got 'p2'"),
        ({"network": None}, "`network` is missing: pass a module with the architecture"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_in_one_sentence(changes, sentence):
    given = {"reference": stack(4, 1), "posteriors": {"A": stack(3, 2)}, "data": IMAGES}
    with pytest.raises(ValueError, match=sentence):
        lightning_bnn.compare(**{**given, "network": NET, **changes})


@pytest.mark.bad_input
def test_what_holds_no_networks_is_refused(tmp_path):
    torch.save({"state_dict": SWAG(NET, members=2).state_dict()}, tmp_path / "swag.ckpt")
    (tmp_path / "empty").mkdir()
    fitted = type("Fitted", (), {"sample": None, "model": NET, "mean": torch.ones(10)})()
    fitted.sample = lambda n: torch.ones(n, 10)
    for arguments, sentence in (
        ((tmp_path,), "`network` is missing: files do not name"),
        ((tmp_path / "empty", NET), "There is no .* file in"),
        ((tmp_path / "swag.ckpt", NET), "whose posterior only its module defines: load it by"),
        ((fitted,), "The mean of Fitted differs from the weights of the network"),
    ):
        with pytest.raises(ValueError, match=sentence):
            Posterior.of(*arguments)
    torch.save({"state_dict": NET.state_dict()}, tmp_path / "empty" / "it.ckpt")
    assert Posterior.of(tmp_path / "empty", NET).size == 1  # the negative control

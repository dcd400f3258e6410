"""Objects of other libraries, by what they have: states with weights by name, and ensembles."""

from types import SimpleNamespace

import pytest
import torch
from scipy.stats import multivariate_normal
from torch import nn

import lightning_bnn
from lightning_bnn.metrics import mutual_information
from lightning_bnn.models import mlp
from lightning_bnn.posteriors import DiagonalGaussian, Empirical, Mixture, Posterior
from weightsym import params as P

NET = mlp(2, [2], 2).double()
PARAMS = dict(NET.named_parameters())
SIZE = sum(p.numel() for p in PARAMS.values())


class State(SimpleNamespace):
    """The shape of the states of `posteriors`: weights by name, and what an algorithm adds."""


def covariance():
    root = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0)).double()
    return root @ root.T / SIZE + torch.eye(SIZE) / 9


def flat_root():
    """The lower root, row by row; the signs of its columns change no covariance."""
    root = torch.linalg.cholesky(covariance()) * (-1.0) ** torch.arange(SIZE)
    return torch.cat([row[: k + 1] for k, row in enumerate(root)])


DENSE = {"cov": covariance, "prec": lambda: torch.linalg.inv(covariance()), "L_factor": flat_root}


def states(count=3, **fields):
    """Sampler states of one chain."""
    networks = P.unstack(P.populate(NET, count, torch.Generator().manual_seed(1)))
    return [State(params=network, **fields) for network in networks]


@pytest.mark.parametrize(
    ("field", "of_std"),
    [("sd_diag", lambda s: s), ("log_sd_diag", torch.log), ("prec_diag", lambda s: s**-2)],
)
def test_a_diagonal_state_is_its_gaussian(field, of_std):
    std = {name: 0.1 + torch.rand_like(p) for name, p in reversed(PARAMS.items())}
    posterior = Posterior.of(
        State(params=PARAMS, **{field: {name: of_std(s) for name, s in std.items()}}), NET
    )
    assert isinstance(posterior, DiagonalGaussian)
    for name, p in PARAMS.items():
        torch.testing.assert_close(posterior.centre[name], p.data, rtol=0, atol=0)
        torch.testing.assert_close(posterior.deviations[name], std[name])


@pytest.mark.parametrize("field", DENSE)
def test_a_dense_state_is_its_gaussian_in_the_order_of_sorted_names(field):
    posterior = Posterior.of(State(params=PARAMS, **{field: DENSE[field]()}))
    stack = P.populate(NET, 5, torch.Generator().manual_seed(1))

    def density(names):
        mean = torch.cat([PARAMS[name].data.flatten() for name in names])
        rows = torch.cat([stack[name].flatten(1) for name in names], 1)
        return torch.from_numpy(multivariate_normal(mean, covariance()).logpdf(rows))

    found = posterior.log_prob(stack)
    torch.testing.assert_close(found, density(sorted(PARAMS)))
    assert not torch.allclose(found, density(PARAMS))  # the negative control
    draws = posterior.sample(20_000, torch.Generator().manual_seed(2))
    rows, _ = P.ravel(draws, sorted(PARAMS), stacked=True)
    mean, _ = P.ravel(PARAMS, sorted(PARAMS))
    torch.testing.assert_close(rows.mean(0), mean.detach(), atol=0.03, rtol=0)
    torch.testing.assert_close(rows.T.cov(), covariance(), atol=0.04, rtol=0)


def test_states_of_a_chain_are_its_networks():
    chain = states(momenta=None)
    posterior = Posterior.of(chain, NET, draws=True)
    assert isinstance(posterior, Empirical)
    assert (posterior.size, len(posterior.modes())) == (3, 1)
    assert len(Posterior.of(tuple(chain)).modes()) == 3
    x = torch.randn(4, 2).double()
    expected = torch.stack([torch.func.functional_call(NET, s.params, (x,)) for s in chain])
    torch.testing.assert_close(posterior.predictor(3)(NET, x), expected)


def test_gaussian_states_of_several_runs_are_a_mixture():
    std = {name: torch.ones_like(p) for name, p in PARAMS.items()}
    posterior = Posterior.of(states(2, sd_diag=std))
    assert isinstance(posterior, Mixture)
    assert len(posterior.modes()) == 2
    assert isinstance(Posterior.of(states(1, sd_diag=std)), DiagonalGaussian)


def test_a_network_gives_what_states_do_not_have():
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    net[1].running_mean.fill_(7)
    last = {name: p for name, p in net.named_parameters() if name.startswith("2.")}
    size = sum(p.numel() for p in last.values())
    for spread in ({"sd_diag": last}, {"cov": torch.eye(size)}):
        stack = Posterior.of(State(params=last, **spread), net).sample(5)
        assert list(stack) == list(P.of(net))
        assert bool((stack["1.running_mean"] == 7).all())
        assert torch.equal(stack["0.weight"], net[0].weight.data.expand(5, 3, 2))
        assert stack["2.bias"].std(0).min() > 0


class Ensemble(nn.Module):
    """The shape of the ensembles of TorchUncertainty, whose outputs are one below the other."""

    def __init__(self, members):
        super().__init__()
        self.core_models = nn.ModuleList(members)

    def forward(self, x):
        return torch.cat([member(x) for member in self.core_models])


def test_an_ensemble_of_modules_in_one():
    theirs, x = Ensemble([mlp(2, [4], 3) for _ in range(4)]), torch.randn(30, 2)
    posterior = Posterior.of(theirs)
    assert len(posterior.modes()) == 4
    found = posterior.predictor(4)(mlp(2, [4], 3), x)
    torch.testing.assert_close(found, theirs(x).unflatten(0, (4, 30)))
    reference, data = [mlp(2, [4], 3) for _ in range(6)], (x, torch.randint(3, (30,)))
    assert len(lightning_bnn.compare(theirs, {"A": reference}, data).tables["distances"].rows)
    assert mutual_information(found, from_logits=True).min() > 0


def zeros(factor=0.0):
    return {name: factor * torch.ones_like(p) for name, p in PARAMS.items()}


REFUSED = {
    "one network": ({}, "State is one network of a chain: pass a list of such states"),
    "no data, no prior": ({"prec_diag": zeros()}, "`prec_diag` of State does not define positive"),
    "a saddle": ({"prec": -torch.eye(SIZE)}, "`prec` of State does not define positive"),
    "nan": ({"cov": torch.nan * torch.eye(SIZE)}, "`cov` of State does not define positive"),
    "names": ({"sd_diag": {"w": torch.ones(1)}}, "`sd_diag` of State does not fit its `params`"),
    "shapes": ({"sd_diag": {n: torch.ones(1) for n in PARAMS}}, "`sd_diag` of State does not fit"),
    "a vector": ({"log_sd_diag": torch.ones(SIZE)}, "`log_sd_diag` of State does not fit"),
    "size": ({"cov": torch.eye(SIZE - 1)}, "`cov` of State does not fit its `params`"),
    "no triangle": ({"L_factor": torch.ones(SIZE)}, "`L_factor` of State does not fit"),
    "weights": (
        {"params": {"w": torch.ones(1)}},
        r"State has 'w' of shape \(1,\), which the network does not",
    ),
    "settings": ({"params": {"lr": 0.1}}, "or a list of networks, got one State"),
    "no mapping": ({"params": [torch.ones(1)]}, "or a list of networks, got one State"),
}


@pytest.mark.bad_input
@pytest.mark.parametrize(("fields", "sentence"), REFUSED.values(), ids=REFUSED)
def test_misleading_states_are_refused_in_one_sentence(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        Posterior.of(State(**{"params": PARAMS, **fields}), NET)


def odd_lists():
    others = Ensemble([mlp(2, [4], 3), mlp(2, [5], 3)])
    yield (
        [*states(2), *states(1, sd_diag=zeros(1.0))],
        "The states are of several classes: pass those",
    )
    yield states(1) * 2, "share tensors: update with `inplace=False`"
    yield others, r"`networks\[1\]` differs from the first network"
    yield Ensemble([]), "must hold at least one network"
    yield [*states(2), 3], r"`networks\[0\]` must be a module or a dict .*, got a State"


@pytest.mark.bad_input
def test_misleading_lists_and_ensembles_are_refused_in_one_sentence():
    for source, sentence in odd_lists():
        with pytest.raises(ValueError, match=sentence):
            Posterior.of(source)
    with pytest.raises(ValueError, match="`network` is missing: pass a module with"):
        lightning_bnn.compare(states(4), {"A": states(3)}, (torch.ones(2, 2), torch.ones(2)))

"""With the packages of others, which are installed by hand: `.ci/others peers` has all of them."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pages import page, pasted
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn.bank import CheckpointBank
from lightning_bnn.metrics import mutual_information
from lightning_bnn.models import mlp
from lightning_bnn.posteriors import Posterior
from weightsym import params as P

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
EXAMPLES = Path(__file__).parents[1] / "examples"
DRAWS = 20_000


@pytest.mark.parametrize("peer", ["torch_uncertainty", "lightning_uq_box"])
def test_callbacks_on_modules_of_others(peer, tmp_path):
    if importlib.util.find_spec(peer) is None:
        pytest.skip(f"{peer} is not installed.")
    call = [sys.executable, str(EXAMPLES / f"with_{peer}.py"), "--epochs", "2"]
    done = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "switched off" not in done.stderr
    (line,) = [row.split() for row in done.stdout.splitlines() if row.startswith("tau ")]
    assert -1 <= float(line[1]) <= 1
    assert float(line[3]) > 0
    assert len(CheckpointBank(tmp_path / "runs" / "bank", "r")) == 2


def test_the_page_of_peers_can_be_pasted(tmp_path, monkeypatch):
    for name in ("laplace", "posteriors", "torch_uncertainty", "probly"):
        pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    pasted(page("docs/peers.md"), "docs/peers.md")


# ------------------------------------------------------------ data and a network for all
@pytest.fixture
def problem():
    torch.manual_seed(0)
    x = torch.randn(120, 4)
    return mlp(4, [5], 3).eval(), x, (x[:, :2].sum(1).sign() + 1).long()


def log_posterior(net, x, y):
    """What `posteriors` maximises and samples: parameters and a batch to a number."""

    def log_density(params, batch):
        outputs = torch.func.functional_call(net, params, (batch[0],))
        prior = sum(p.square().sum() for p in params.values()) / 2
        return -nn.functional.cross_entropy(
            outputs, batch[1], reduction="sum"
        ) - prior, x.new_zeros(1)

    return log_density


def gaussian(name, net, x, y):
    """A state of `posteriors` after a few updates, and the module of its algorithm."""
    library, torchopt = pytest.importorskip("posteriors"), pytest.importorskip("torchopt")
    params, (family, algorithm) = dict(net.named_parameters()), name.split(".")
    log_density, size = log_posterior(net, x, y), sum(p.numel() for p in params.values())
    spread = {name: 0.1 + 0.4 * torch.rand_like(p) for name, p in params.items()}
    root = torch.randn(size, size).tril() / 9 + torch.diag(0.1 + 0.4 * torch.rand(size))
    options = {
        "vi.diag": {"init_log_sds": {name: s.log() for name, s in spread.items()}},
        "vi.dense": {"init_L": root},
        "laplace.diag_fisher": {"init_prec_diag": 1.0},
        "laplace.dense_fisher": {"init_prec": 9 * root @ root.T + torch.eye(size)},
        "ekf.diag_fisher": {"lr": 0.01, "init_sds": spread},
        "ekf.dense_fisher": {"lr": 0.01, "init_cov": root @ root.T},
    }[name]
    if family == "vi":
        options["optimizer"] = torchopt.adam(lr=0.01)
    module = getattr(getattr(library, family), algorithm)
    transform = module.build(log_density, **options)
    state = transform.init(params)
    for batch in zip(x.split(40), y.split(40), strict=True):
        state, _ = transform.update(state, batch)
    return state, module


def their_rows(state, module):
    """Draws of their own, joined to vectors by their own function."""
    from optree.integrations.torch import tree_ravel

    mean, unravel = tree_ravel(state.params)
    if hasattr(state, "prec"):  # 0.1.3 draws vectors only, where parameters are matrices
        law = torch.distributions.MultivariateNormal(mean, precision_matrix=state.prec)
        draws = torch.vmap(unravel)(law.sample((DRAWS,)))
    else:
        draws = module.sample(state, torch.Size([DRAWS]))
    return {name: t.detach() for name, t in draws.items()}


GAUSSIANS = (
    "vi.diag vi.dense laplace.diag_fisher laplace.dense_fisher ekf.diag_fisher ekf.dense_fisher"
).split()


@pytest.mark.parametrize("name", GAUSSIANS)
def test_a_gaussian_of_posteriors_has_their_moments(name, problem):
    state, module = gaussian(name, *problem)
    posterior, net = Posterior.of(state, problem[0]), problem[0]
    ours = posterior.sample(DRAWS, torch.Generator().manual_seed(1))
    theirs = their_rows(state, module)
    a, b = (P.ravel(stack, list(P.of(net)), stacked=True)[0].double() for stack in (ours, theirs))
    scale = b.std(0)
    assert ((a.mean(0) - b.mean(0)).abs() / scale).max() < 6 * (2 / DRAWS) ** 0.5
    assert (a.std(0) / scale - 1).abs().max() < 6 * DRAWS**-0.5
    assert (a.T.corrcoef() - b.T.corrcoef()).abs().max() < 6 * (2 / DRAWS) ** 0.5
    assert scale.max() / scale.min() > 1.2  # so that another order would have other moments
    x = problem[1]
    predicted = [posterior.predict(net, x, 2000).softmax(-1).mean(0)]
    predicted += [P.apply(net, {n: t[:2000] for n, t in theirs.items()}, x).softmax(-1).mean(0)]
    torch.testing.assert_close(*predicted, atol=0.03, rtol=0)


@pytest.mark.parametrize("name", ["sgld", "sghmc", "baoa", "sgnht"])
def test_a_chain_of_posteriors_predicts_as_its_states_do(name, problem):
    library, (net, x, y) = pytest.importorskip("posteriors"), problem
    transform = getattr(library.sgmcmc, name).build(log_posterior(net, x, y), lr=1e-3)
    state, chain = transform.init(dict(net.named_parameters())), []
    for _ in range(5):
        state, _ = transform.update(state, (x, y))
        chain.append(state)
    posterior = Posterior.of(chain, net, draws=True)
    assert len(posterior.modes()) == 1
    theirs = torch.stack([torch.func.functional_call(net, s.params, (x,)) for s in chain])
    torch.testing.assert_close(posterior.predictor(5)(net, x), theirs)


# ------------------------------------------------------------ whatever holds the networks
def laplace_of(net, x, y):
    laplace = pytest.importorskip("laplace")
    fitted = laplace.Laplace(net, "classification", "all", hessian_structure="diag")
    fitted.fit(DataLoader(TensorDataset(x, y), 40))
    return fitted


def ensemble_of(net, x, y):
    methods = pytest.importorskip("torch_uncertainty.methods")
    return methods.deep_ensembles(net, num_estimators=4).eval()


def probly_ensemble_of(net, x, y):
    method = pytest.importorskip("probly.method.ensemble")
    return method.ensemble(net, num_members=4, predictor_type="logit_classifier").eval()


def test_a_fitted_laplace_has_its_own_variances(problem):
    fitted = laplace_of(*problem)
    draws = Posterior.of(fitted).sample(DRAWS, torch.Generator().manual_seed(1))
    rows, _ = P.ravel(draws, stacked=True)
    std = fitted.posterior_variance.sqrt()
    assert (rows.std(0) / std - 1).abs().max() < 6 * DRAWS**-0.5
    assert ((rows.mean(0) - fitted.mean).abs() / std).max() < 6 * DRAWS**-0.5


def test_ensembles_predict_as_they_do_themselves(problem):
    net, x, _ = problem
    theirs = ensemble_of(*problem)
    found = Posterior.of(theirs).predictor(4)(net, x)
    torch.testing.assert_close(found, theirs(x).unflatten(0, (4, len(x))))
    assert mutual_information(found, from_logits=True).min() > 0
    theirs = probly_ensemble_of(*problem)
    found = Posterior.of(theirs).predictor(4)(net, x)
    torch.testing.assert_close(found, torch.stack([member(x) for member in theirs]))

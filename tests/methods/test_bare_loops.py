"""Methods train without Lightning, in a bare loop."""

import pytest
import torch
from module_cases import OF_EACH_CLASS, Blobs, made, network

from lightning_bnn import methods, params
from lightning_bnn.methods import Batch, Fit, Progress, Purpose, Run
from lightning_bnn.posteriors import Dropout

STEPS, PER_EPOCH, ROWS = 36, 6, 10
X, Y = Blobs().load().train
TOLD = {"num_data": len(X), "seed": 0}
"""Facts that a trainer tells samplers."""
ALL = [Batch((X[k : k + ROWS],), Y[k : k + ROWS], number=k // ROWS) for k in range(0, len(X), ROWS)]


def nll(probabilities):
    return -probabilities.log()[torch.arange(len(Y)), Y].mean().item()


def prediction(method, state, net, run):
    posterior = method.posterior(state, run, Purpose(predicts=True))
    outputs = posterior.predict(net.eval(), X, getattr(posterior, "size", 30))
    return outputs.softmax(-1).mean(0)


def trained(name):
    """Train two members, with the prediction before and after."""
    module = made(name)
    method, net = module.method, module.template
    run = Run(net, num_data=len(X), rows=(X[:2],))
    state = method.init(net, params.populate(net, 2, torch.Generator().manual_seed(1)))
    moving = module.make_optimizer([p for p in state.parameters() if p.requires_grad])
    for group in moving.param_groups:
        group.update({n: v for n, v in TOLD.items() if n in group and group[n] is None})
    method.configure_optimizer(state, moving, run, None, STEPS / PER_EPOCH)
    before = prediction(method, state, net, run)
    net.train()
    method.before_fit(
        state, Fit(epochs=STEPS / PER_EPOCH, optimizer=moving, batches=lambda: ALL), run
    )
    for step in range(STEPS):
        if isinstance(method, methods.Transitions):
            method.transition(state, run, moving.step)
        else:
            moving.zero_grad()
            method.losses(state, ALL[step % PER_EPOCH], run)["loss"].sum().backward()
            moving.step()
        ends = (step + 1) % PER_EPOCH == 0
        method.after_step(state, Progress(step + 1, step // PER_EPOCH, ends, moving), run)
    method.at_end(state, ALL, run)
    method.after_fit(state, run)
    return before, prediction(method, state, net, run), method.posterior(state, run), state


@pytest.mark.parametrize("name", OF_EACH_CLASS)
def test_every_method_learns_in_a_bare_loop(name):
    before, after, posterior, state = trained(name)
    assert nll(after) < 0.65 * nll(before)
    networks = posterior.sample(2)
    assert networks.keys() == state.stack().keys() or isinstance(posterior, Dropout)
    assert all(len(t) == 2 and t.isfinite().all() for t in networks.values())


@pytest.mark.parametrize("make", [methods.DeepEnsemble, methods.SWAG])
def test_the_prior_has_the_share_of_one_example(make):
    net, batch = network(), Batch((torch.randn(8, 6),), torch.arange(8) % 3)
    method, run = make(prior_std=0.5), Run(net, num_data=10)
    found = method.init(net, params.populate(net, 3))
    terms = method.losses(found, batch, run)
    rows = params.ravel(found.stack(), stacked=True)[0]
    log_prior = torch.distributions.Normal(0.0, 0.5).log_prob(rows).sum(1)
    torch.testing.assert_close(terms["loss"], terms["nll"] - log_prior / 10)

"""A step of variational inference next to a deterministic one and to peers, 784-512-512-10.

python benchmarks/vi.py steps [--batch 128] [--threads 1] [--device cpu]

All contestants take the same batches and torch.optim.Adam, in turns. The peers are installed by
`make bench`; those that are not there are left out.
"""

import functools
import itertools
import warnings

import torch
from record import Record, parsed, parser
from torch import nn
from torch.nn.functional import cross_entropy
from turns import present, stepper, taking_turns

from lightning_bnn import models
from lightning_bnn.modules import MFVI, SymmetrizedVI

warnings.filterwarnings("ignore")
N = 60_000
START, PERIOD = -5.0, 4
"""Logarithm of the standard deviations at the start; steps in a round."""


def network():
    return models.mlp(784, [512, 512], 10)


def batch(options):
    x = torch.randn(options.batch, 784, device=options.device)
    return x, torch.randint(10, (options.batch,), device=options.device)


# ------------------------------------------------------------ contestants
adam = functools.partial(stepper, optimizer=lambda p: torch.optim.Adam(p, 1e-3))


def deterministic(options):
    net = network().to(options.device)
    return adam(lambda x, y: cross_entropy(net(x), y), net.parameters())


def ours(options, kind=MFVI, log_std=START, **arguments):
    module = kind(network(), num_data=N, **arguments).to(options.device)
    module.example_input_array = batch(options)[0][:2]
    with torch.no_grad():
        module.state.log_std.fill_(log_std)

    numbers = itertools.count()

    def loss(x, y):
        return module.losses((x,), y, number=next(numbers))["loss"].sum()

    return adam(loss, module.parameters())


def converted(linear):
    """The network with its linear layers replaced."""
    net = network()
    for name, child in list(net.named_children()):
        if isinstance(child, nn.Linear):
            setattr(net, name, linear(child))
    return net


def blitz(options):
    from blitz.losses import kl_divergence_from_nn
    from blitz.modules import BayesianLinear

    prior = torch.distributions.Normal(0, 1)

    def linear(m):
        return BayesianLinear(m.in_features, m.out_features, m.bias is not None, prior_dist=prior)

    net = converted(linear).to(options.device)
    return adam(
        lambda x, y: cross_entropy(net(x), y) + kl_divergence_from_nn(net) / N, net.parameters()
    )


def bayesian_torch(options):
    from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn, get_kl_loss

    settings = {
        "prior_mu": 0.0, "prior_sigma": 1.0, "posterior_mu_init": 0.0, "posterior_rho_init": -3.0,
        "type": "Reparameterization", "moped_enable": False, "moped_delta": 0.5,
    }  # fmt: skip
    net = network()
    dnn_to_bnn(net, settings)
    net = net.to(options.device)
    return adam(lambda x, y: cross_entropy(net(x), y) + get_kl_loss(net) / N, net.parameters())


def torch_uncertainty(options):
    from torch_uncertainty.layers.bayesian import BayesLinear
    from torch_uncertainty.losses import ELBOLoss

    def linear(m):
        return BayesLinear(m.in_features, m.out_features, bias=m.bias is not None)

    net = converted(linear).to(options.device)
    elbo = ELBOLoss(net, nn.CrossEntropyLoss(), kl_weight=1 / N, num_samples=1)
    return adam(lambda x, y: elbo(x, y), net.parameters())


def density_of_posteriors(net):
    """The log-posterior over N as that library wants it."""
    import posteriors as library

    call = library.model_to_function(net)

    def log_posterior(params, data):
        prior = library.diag_normal_log_prob(params, sd_diag=1.0)
        return -cross_entropy(call(params, data[0]), data[1]) + prior / N, torch.tensor([])

    return log_posterior


def posteriors(options):
    import posteriors as library

    net = network().to(options.device)
    mean = {k: v.detach().clone().requires_grad_() for k, v in net.named_parameters()}
    logs = {k: torch.full_like(v, START).requires_grad_() for k, v in mean.items()}
    log_posterior = density_of_posteriors(net)

    def loss(x, y):
        deviations = {k: v.exp() for k, v in logs.items()}
        return library.vi.diag.nelbo(
            mean, deviations, (x, y), log_posterior, temperature=1 / N, n_samples=1
        )[0]

    return adam(loss, [*mean.values(), *logs.values()])


PEERS = {
    "BLiTZ": blitz,
    "bayesian-torch": bayesian_torch,
    "torch-uncertainty": torch_uncertainty,
    "posteriors": posteriors,
}


def contestants(options):
    return {
        "deterministic": deterministic(options),
        "MFVI": ours(options),
        "MFVI, flipout": ours(options, reparameterisation="flipout"),
        "MFVI, local": ours(options, reparameterisation="local"),
        "SymmetrizedVI, bethe": ours(options, SymmetrizedVI),
        "SymmetrizedVI, bethe, all units alike": ours(options, SymmetrizedVI, 0.0),
        "the same, every=1": ours(options, SymmetrizedVI, 0.0, every=1),
        "SymmetrizedVI, uniform, 20 draws": ours(
            options, SymmetrizedVI, estimator="uniform", draws=20
        ),
        **present(PEERS, options),
    }


def steps(options, record):
    rivals = contestants(options)
    x, y = batch(options)
    functions = {name: lambda step=step: several(step, x, y) for name, step in rivals.items()}
    noise = torch.empty(sum(p.numel() for p in network().parameters()))
    noise = noise.to(options.device)
    functions["(the normal draw alone)"] = lambda: several(noise.normal_)
    found = taking_turns(functions, options.repeats, options.device)
    record.times(found, network="mlp", steps=PERIOD)


def several(step, *batch):
    """As many steps as gradients of the information are reused for."""
    for _ in range(PERIOD):
        step(*batch)


if __name__ == "__main__":
    made = parser(__doc__, ("steps",), repeats=30)
    made.add_argument("--batch", type=int, default=128)
    chosen = parsed(made)
    record = Record(chosen)
    steps(chosen, record)
    record.write()

"""A step of variational inference next to a deterministic one and to peers; predictions.

python benchmarks/vi.py steps [--network mlp|resnet] [--threads 1] [--device cpu]
python benchmarks/vi.py predict [--threads 1]

All contestants take the same batches and torch.optim.Adam, in turns. The peers are installed by
`make bench`; those that are not there are left out.
"""

import warnings

import torch
from record import Record, parsed, parser
from torch import nn
from torch.nn.functional import cross_entropy
from turns import taking_turns

from lightning_bnn import models
from lightning_bnn import params as P
from lightning_bnn.modules import MFVI, SymmetrizedVI
from lightning_bnn.posteriors import DiagonalGaussian

warnings.filterwarnings("ignore")
N = 60_000
FUSED = False
START = -5.0
"""Logarithm of the standard deviations at the start."""


def network(kind):
    return models.mlp(784, [512, 512], 10) if kind == "mlp" else models.resnet18(10, 32)


def batch(options):
    shape = (784,) if options.network == "mlp" else (3, 32, 32)
    x = torch.randn(options.batch, *shape, device=options.device)
    return x, torch.randint(10, (options.batch,), device=options.device)


# ------------------------------------------------------------ contestants
def stepper(loss, parameters):
    optimizer = torch.optim.Adam(parameters, 1e-3, fused=FUSED or None)

    def step(x, y):
        optimizer.zero_grad()
        loss(x, y).backward()
        optimizer.step()

    return step


def deterministic(options):
    net = network(options.network).to(options.device)
    return stepper(lambda x, y: cross_entropy(net(x), y), net.parameters())


def ours(options, kind=MFVI, log_std=START, **arguments):
    module = kind(network(options.network), num_data=N, **arguments).to(options.device)
    module.example_input_array = batch(options)[0][:2]
    with torch.no_grad():
        module.log_std.fill_(log_std)

    def loss(x, y):
        return module.losses((x,), y)["loss"].sum()

    return stepper(loss, module.parameters())


def converted(module, linear, conv):
    """The module with its linear layers and convolutions replaced."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, linear(child))
        elif isinstance(child, nn.Conv2d):
            setattr(module, name, conv(child))
        else:
            converted(child, linear, conv)
    return module


def blitz(options):
    from blitz.losses import kl_divergence_from_nn
    from blitz.modules import BayesianConv2d, BayesianLinear

    prior = torch.distributions.Normal(0, 1)

    def linear(m):
        return BayesianLinear(m.in_features, m.out_features, m.bias is not None, prior_dist=prior)

    def conv(m):
        return BayesianConv2d(
            m.in_channels, m.out_channels, tuple(m.kernel_size), stride=m.stride,
            padding=m.padding, bias=m.bias is not None, prior_dist=prior,
        )  # fmt: skip

    net = converted(network(options.network), linear, conv).to(options.device)
    return stepper(
        lambda x, y: cross_entropy(net(x), y) + kl_divergence_from_nn(net) / N, net.parameters()
    )


def bayesian_torch(options):
    from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn, get_kl_loss

    settings = {
        "prior_mu": 0.0, "prior_sigma": 1.0, "posterior_mu_init": 0.0, "posterior_rho_init": -3.0,
        "type": "Reparameterization", "moped_enable": False, "moped_delta": 0.5,
    }  # fmt: skip
    net = network(options.network)
    dnn_to_bnn(net, settings)
    net = net.to(options.device)
    return stepper(lambda x, y: cross_entropy(net(x), y) + get_kl_loss(net) / N, net.parameters())


def torch_uncertainty(options):
    from torch_uncertainty.layers.bayesian import BayesConv2d, BayesLinear
    from torch_uncertainty.losses import ELBOLoss

    def linear(m):
        return BayesLinear(m.in_features, m.out_features, bias=m.bias is not None)

    def conv(m):
        return BayesConv2d(
            m.in_channels, m.out_channels, m.kernel_size, m.stride, m.padding,
            bias=m.bias is not None,
        )  # fmt: skip

    net = converted(network(options.network), linear, conv).to(options.device)
    elbo = ELBOLoss(net, nn.CrossEntropyLoss(), kl_weight=1 / N, num_samples=1)
    return stepper(lambda x, y: elbo(x, y), net.parameters())


def posteriors(options):
    import posteriors as library

    net = network(options.network).to(options.device)
    call = library.model_to_function(net)
    mean = {k: v.detach().clone().requires_grad_() for k, v in net.named_parameters()}
    logs = {k: torch.full_like(v, START).requires_grad_() for k, v in mean.items()}

    def log_posterior(params, data):
        prior = library.diag_normal_log_prob(params, sd_diag=1.0)
        return -cross_entropy(call(params, data[0]), data[1]) + prior / N, torch.tensor([])

    def loss(x, y):
        deviations = {k: v.exp() for k, v in logs.items()}
        return library.vi.diag.nelbo(
            mean, deviations, (x, y), log_posterior, temperature=1 / N, n_samples=1
        )[0]

    return stepper(loss, [*mean.values(), *logs.values()])


PEERS = {
    "BLiTZ": blitz,
    "bayesian-torch": bayesian_torch,
    "torch-uncertainty": torch_uncertainty,
    "posteriors": posteriors,
}


def contestants(options):
    found = {
        "deterministic": deterministic(options),
        "MFVI": ours(options),
        "MFVI, flipout": ours(options, reparameterisation="flipout"),
        "MFVI, local": ours(options, reparameterisation="local"),
        "SymmetrizedVI, bethe": ours(options, SymmetrizedVI),
    }
    if options.network == "mlp":
        found["SymmetrizedVI, bethe, all units alike"] = ours(options, SymmetrizedVI, 0.0)
        found["SymmetrizedVI, uniform, 20 draws"] = ours(
            options, SymmetrizedVI, estimator="uniform", draws=20
        )
    for name, make in PEERS.items():
        try:
            found[name] = make(options)
        except ImportError as error:
            print(f"{name} is left out: {error}")
    return found


# ------------------------------------------------------------ runs
def steps(options, record):
    rivals = contestants(options)
    x, y = batch(options)
    functions = {name: lambda step=step: step(x, y) for name, step in rivals.items()}
    noise = torch.empty(sum(p.numel() for p in network(options.network).parameters()))
    noise = noise.to(options.device)
    functions["(the normal draw alone)"] = noise.normal_
    found = taking_turns(functions, options.repeats, options.device)
    record.times(found, network=options.network)


def predict(options, record):
    cases = {
        "perceptron 2-10-2": (models.mlp(2, [10], 2), (2,)),
        "perceptron 64-32-10": (models.mlp(64, [32], 10), (64,)),
        "OptuNet": (models.optunet(), (1, 28, 28)),
        "perceptron 784-10-10": (models.mlp(784, [10], 10), (784,)),
        "perceptron 784-30-10": (models.mlp(784, [30], 10), (784,)),
        "perceptron 784-512-512-10": (models.mlp(784, [512, 512], 10), (784,)),
    }
    for name, (net, shape) in cases.items():
        net = net.eval().to(options.device)
        posterior = DiagonalGaussian(P.of(net), 0.1).to(options.device).requires_grad_(False)
        x = torch.randn(128, *shape, device=options.device)
        count = 1000 if posterior.mean.numel() < 10**5 else 100
        networks = posterior.sample(count)
        run = posterior.predictor(count)

        def loop(net=net, networks=networks, x=x):
            outputs = []
            for network in P.unstack(networks):
                outputs.append(torch.func.functional_call(net, network, (x,)))
            return torch.stack(outputs)

        calls = {"ours": lambda run=run, net=net, x=x: run(net, x), "loop": loop}
        with torch.no_grad():
            found = taking_turns(calls, 5, options.device)
        record.times(found, network=name, weights=posterior.mean.numel(), samples=count)


PARTS = {"steps": steps, "predict": predict}


if __name__ == "__main__":
    made = parser(__doc__, tuple(PARTS), repeats=30)
    made.add_argument("--network", choices=("mlp", "resnet"), default="mlp")
    made.add_argument("--batch", type=int, default=128)
    made.add_argument("--fused", action="store_true", help="Adam(fused=True) for everyone")
    chosen = parsed(made)
    FUSED = chosen.fused
    record = Record(chosen)
    PARTS[chosen.part](chosen, record)
    record.write()

"""Steps of samplers next to SGD and to peers, for a perceptron 784-512-512-10.

python benchmarks/samplers.py steps [--batch 128] [--threads 1]

All contestants take the same batches, in turns. The peers are installed by `make bench`; those that
are not there are left out.
"""

import warnings

import torch
from record import Record, parsed, parser
from torch.nn.functional import cross_entropy
from turns import taking_turns

from lightning_bnn import models, samplers

warnings.filterwarnings("ignore")
N, RATE = 60_000, 1e-3


def network():
    return models.mlp(784, [512, 512], 10)


# ------------------------------------------------------------ optimizers
def ours(parameters):
    return samplers.SGHMC(parameters, lr=RATE, num_data=N, prior_precision=1.0)


def ours_sgld(parameters):
    return samplers.SGLD(parameters, lr=RATE, num_data=N, prior_precision=1.0)


def ours_preconditioned(parameters):
    return samplers.PreconditionedSGLD(parameters, lr=RATE, num_data=N, prior_precision=1.0)


def sgd(parameters):
    return torch.optim.SGD(parameters, RATE, momentum=0.9, weight_decay=1 / N, foreach=True)


def torch_uncertainty_sghmc(parameters):
    from torch_uncertainty.optim import SGHMC as Theirs

    return Theirs(parameters, lr=RATE)


def torch_uncertainty_sgld(parameters):
    from torch_uncertainty.optim import SGLD as Theirs

    return Theirs(parameters, lr=RATE)


OPTIMIZERS = {
    "SGD with momentum": sgd,
    "SGHMC": ours,
    "SGLD": ours_sgld,
    "PreconditionedSGLD": ours_preconditioned,
    "torch-uncertainty SGHMC": torch_uncertainty_sghmc,
    "torch-uncertainty SGLD": torch_uncertainty_sgld,
}


def posteriors(net, x, y):
    """The functional library: its whole step."""
    import posteriors as library

    call = library.model_to_function(net)

    def log_posterior(params, data):
        prior = library.diag_normal_log_prob(params, sd_diag=1.0)
        return -cross_entropy(call(params, data[0]), data[1]) + prior / N, torch.tensor([])

    transform = library.sgmcmc.sghmc.build(log_posterior, lr=RATE, temperature=1 / N)
    state = transform.init(dict(net.named_parameters()))
    box = [state]

    def step():
        box[0], _ = transform.update(box[0], (x, y), inplace=True)

    return step


def available(table):
    found = {}
    for name, make in table.items():
        try:
            make([torch.nn.Parameter(torch.zeros(1))])
        except ImportError as error:
            print(f"{name} is left out: {error}")
        else:
            found[name] = make
    return found


# ------------------------------------------------------------ runs
def steps(options, record):
    """Forward pass, backward pass and update."""
    x = torch.randn(options.batch, 784, device=options.device)
    y = torch.randint(10, (options.batch,), device=options.device)
    functions = {}
    for name, make in available(OPTIMIZERS).items():
        net = network().to(options.device)
        functions[name] = plain_step(net, make(net.parameters()), x, y)
    try:
        net = network().to(options.device)
        functions["posteriors SGHMC"] = posteriors(net, x, y)
    except ImportError as error:
        print(f"posteriors is left out: {error}")
    found = taking_turns(functions, options.repeats, options.device)
    record.times(found, network="mlp")


def plain_step(net, optimizer, x, y):
    def step():
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()

    return step


def main():
    made = parser(__doc__, ("steps",), repeats=30)
    made.add_argument("--batch", type=int, default=128)
    options = parsed(made)
    record = Record(options)
    steps(options, record)
    record.write()


if __name__ == "__main__":
    main()

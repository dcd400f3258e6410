"""Steps of samplers next to SGD and to peers, and chains side by side.

python benchmarks/samplers.py steps [--network mlp|resnet] [--batch 128] [--threads 1]
python benchmarks/samplers.py chains [--threads 1]

All contestants take the same batches, in turns. The peers are installed by `make bench`; those that
are not there are left out.
"""

import copy
import logging
import warnings

import lightning as L
import torch
from record import Record, parsed, parser
from torch.nn.functional import cross_entropy
from turns import taking_turns

from lightning_bnn import models, samplers
from lightning_bnn.methods.batch import Batch
from lightning_bnn.methods.member_losses import member_losses
from lightning_bnn.modules import SGHMC

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
N, RATE, STEPS = 60_000, 1e-3, 100


def network(kind):
    return models.mlp(784, [512, 512], 10) if kind == "mlp" else models.resnet18(10, 32)


def batch(kind, size, device):
    shape = (784,) if kind == "mlp" else (3, 32, 32)
    x = torch.randn(size, *shape, device=device)
    return x, torch.randint(10, (size,), device=device)


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
    x, y = batch(options.network, options.batch, options.device)
    functions = {}
    for name, make in available(OPTIMIZERS).items():
        net = network(options.network).to(options.device)
        functions[name] = plain_step(net, make(net.parameters()), x, y)
    try:
        net = network(options.network).to(options.device).eval()  # it cannot train BatchNorm
        functions["posteriors SGHMC"] = posteriors(net, x, y)
    except ImportError as error:
        print(f"posteriors is left out: {error}")
    found = taking_turns(functions, options.repeats, options.device)
    record.times(found, network=options.network)


def plain_step(net, optimizer, x, y):
    def step():
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()

    return step


def chains(options, record):
    """Eight chains side by side, and eight runs one after the other; bare, and in Lightning."""
    cases = {
        "MLP 2-10-2": (models.mlp(2, [10], 2), (2,), 2),
        "MLP 64-32-10": (models.mlp(64, [32], 10), (64,), 10),
        "OptuNet": (models.optunet(), (1, 28, 28), 10),
        "MLP 784-10-10": (models.mlp(784, [10], 10), (784,), 10),
        "MLP 784-512-512-10": (models.mlp(784, [512, 512], 10), (784,), 10),
    }
    for name, (net, shape, classes) in cases.items():
        x = torch.randn(64, *shape, device=options.device)
        y = torch.randint(classes, (64,), device=options.device)
        runs = [one_run(net, x, y, options.device) for _ in range(8)]
        bare = {
            "8 runs": lambda runs=runs: [run() for run in runs],
            "8 chains": side_by_side(net, x, y, options.device),
        }
        fits = {
            "8 runs": lambda n=net, x=x, y=y: [fitted(n, 1, x, y, options) for _ in range(8)],
            "8 chains": lambda n=net, x=x, y=y: fitted(n, 8, x, y, options),
        }
        labels = {"network": name, "weights": sum(p.numel() for p in net.parameters())}
        found = taking_turns(bare, options.repeats, options.device)
        record.times(found, **labels, loop="bare", steps=1)
        found = taking_turns(fits, 1, options.device, warm=1)
        record.times(found, **labels, loop="Trainer.fit", steps=STEPS)


def fitted(net, members, x, y, options):
    """A run of Lightning, from the start of the trainer on."""
    data = torch.utils.data.TensorDataset(x.repeat(STEPS, *[1] * (x.ndim - 1)), y.repeat(STEPS))
    loader = torch.utils.data.DataLoader(data, batch_size=64)
    module = SGHMC(net, members=members, prior_std=None, burn_in=2, optimizer=ours)
    kind = "gpu" if options.device == "cuda" else "cpu"
    L.Trainer(
        max_epochs=1, accelerator=kind, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(module, loader)  # fmt: skip


def one_run(net, x, y, device):
    own = copy.deepcopy(net).to(device)
    return plain_step(own, ours(own.parameters()), x, y)


def side_by_side(net, x, y, device):
    module = SGHMC(net, members=8).to(device)
    optimizer = ours(module.networks.parameters())

    def step():
        optimizer.zero_grad()
        stack = dict(module.networks.named_parameters())
        losses = member_losses(module.template, stack, Batch((x,), y), module.run.nll)
        losses.sum().backward()
        optimizer.step()

    return step


PARTS = {"steps": steps, "chains": chains}


def main():
    made = parser(__doc__, tuple(PARTS), repeats=30)
    made.add_argument("--network", choices=["mlp", "resnet"], default="mlp")
    made.add_argument("--batch", type=int, default=128)
    options = parsed(made)
    record = Record(options)
    PARTS[options.part](options, record)
    record.write()


if __name__ == "__main__":
    main()

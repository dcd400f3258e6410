"""Small networks in files, their units in any order, for the commands that match and merge."""

import torch
from safetensors.torch import save_file
from torch import nn

from lightning_bnn import models
from weightsym import discover, permute, random_permutations
from weightsym import params as P

PLAIN = ["--network", "lightning_bnn.models.mlp", "--input", "2,4", "--init.inputs", "4"]
PLAIN += ["--init.hidden", "[7, 6]", "--init.outputs", "3"]
KNOWN = {}
EXPERTS = ["--network", "disk_networks.Experts", "--input", "5,4"]
NORMED = ["--network", "disk_networks.normed", "--input", "5,4"]
FACTORED = ["--network", "disk_networks.factored", "--input", "5,4"]


def plain():
    return models.mlp(4, [7, 6], 3)


def normed():
    """A network with a norm over batches."""
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def factored():
    """A first layer of two factors, whose channels any invertible matrix may mix."""
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 7), nn.ReLU(), nn.Linear(7, 3))


class Experts(nn.Module):
    """A router and three experts that are modules of their own."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)) for _ in range(3)
        )

    def forward(self, x):
        results = torch.stack([expert(x) for expert in self.experts], -1)
        return (results * self.router(x).softmax(-1)[:, None]).sum(-1)


def drawn(build, seed=0):
    """A network whose statistics are its own, too."""
    torch.manual_seed(seed)
    net = build()
    for name, tensor in net.state_dict().items():
        if name.endswith(("running_mean", "running_var")):
            tensor.uniform_(0.5, 2)
    return net.eval()


def known(net, *example, batch_norm="carrier"):
    """Symmetries of a network, read once for all that have its layers."""
    if repr(net) not in KNOWN:
        KNOWN[repr(net)] = discover(net, *example, batch_norm=batch_norm)
    return KNOWN[repr(net)]


def orders(net, seed):
    """The same network with its units in another order."""
    sym = known(net, torch.randn(2, 4))
    generator = torch.Generator().manual_seed(seed)
    return permute(P.of(net), sym, random_permutations(sym, generator))


def write(path, state, dtype=None, prefix=""):
    """A safetensors file; returns its name."""
    kept = {
        prefix + n: t.to(dtype if t.is_floating_point() and dtype else t.dtype).contiguous()
        for n, t in state.items()
    }
    save_file(kept, path, {"format": "pt", "from": path.stem})
    return str(path)

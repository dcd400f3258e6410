"""What is drawn and numbered with one seed, as hashes by name: methods, networks, adapters."""

import hashlib
import json
import sys

import torch
from checked_symmetries import find
from known_networks.classics import SMALL
from module_cases import OF_EACH_CLASS, Blobs, made, trainer
from torch import nn

from weightsym import canonicalise, fingerprint, permute, random_permutations
from weightsym import params as P

__all__ = ["adapted", "hash_of"]


def hash_of(value):
    """A hash of tensors by name in their order, or of a text."""
    code = hashlib.sha256()
    if isinstance(value, str):
        code.update(value.encode())
        return code.hexdigest()[:16]
    for name, tensor in value.items():
        code.update(f"{name} {tuple(tensor.shape)}".encode())
        code.update(tensor.detach().contiguous().numpy().tobytes())
    return code.hexdigest()[:16]


class Adapter(nn.Module):
    """A fixed layer beside two factors, under the names of peft."""

    def __init__(self, size):
        super().__init__()
        self.base = nn.Linear(size, size).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(size, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, size, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)

    def reset_lora_parameters(self, name, init_lora_weights):
        nn.init.kaiming_uniform_(self.lora_A[name].weight, a=5**0.5)
        nn.init.zeros_(self.lora_B[name].weight)

    def forward(self, x):
        return self.base(x) + self.lora_B["default"](self.lora_A["default"](x))


def adapted(layers=12, size=6):
    """A network of adapters that have learned nothing yet."""
    torch.manual_seed(0)
    return nn.Sequential(*(Adapter(size) for _ in range(layers)))


def of_methods():
    """The weights after an epoch, and a network of the posterior."""
    for name in OF_EACH_CLASS:
        module = made(name)
        trainer(max_epochs=1).fit(module, Blobs())
        drawn = module.posterior().sample(1, torch.Generator().manual_seed(1))
        yield f"{name} trained", hash_of(P.of(module.state))
        yield f"{name} drawn", hash_of(drawn)


def of_networks():
    """Groups and their order, a permutation, the canonical form, the fingerprint, new members."""
    for name in SMALL:
        net, _, symmetries, params = find(name)
        moves = random_permutations(symmetries, torch.Generator().manual_seed(1))
        yield f"{name} groups", hash_of(repr(symmetries))
        yield f"{name} moved", hash_of(permute(params, symmetries, moves))
        yield f"{name} canonical", hash_of(canonicalise(params, symmetries))
        yield f"{name} fingerprint", hash_of(str(fingerprint(params, symmetries)))
        yield f"{name} members", hash_of(P.populate(net, 2, torch.Generator().manual_seed(1)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    json.dump(dict([*of_methods(), *of_networks()]), sys.stdout)

"""The configuration of a population that is trained in an instant, and what is in its bank."""

import torch

from lightning_bnn.bank import CheckpointBank

__all__ = ["CONFIG", "networks", "same"]

CONFIG = {
    "seed_everything": 0,
    "model": {
        "class_path": "DeepEnsemble",
        "init_args": {
            "network": {
                "class_path": "lightning_bnn.models.mlp",
                "init_args": {"inputs": 2, "hidden": [2], "outputs": 1},
            },
            "likelihood": {"class_path": "lightning_bnn.likelihoods.Bernoulli"},
            "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 2.0}},
        },
    },
    "data": {"class_path": "TwoGaussians", "init_args": {"size": 50, "orders": 1}},
    "trainer": {"max_epochs": 3, "accelerator": "cpu", "logger": False},
}


def networks(folder):
    """By the number of the member; every member comes once."""
    bank = CheckpointBank(folder, "r")
    members = [r["member"] for r in bank.records]
    assert len(members) == len(set(members))
    return {m: bank[row] for row, m in enumerate(members)}


def same(a, b, exact=True):
    assert a.keys() == b.keys()
    for member, network in a.items():
        for name, tensor in network.items():
            if exact:
                assert torch.equal(tensor, b[member][name])
            else:
                torch.testing.assert_close(tensor, b[member][name], rtol=1e-3, atol=1e-4)

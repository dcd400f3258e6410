"""A bank as a data set of torch: canonical weights, and a number of each record."""

import pytest
import torch

from lightning_bnn.bank import CheckpointBank, labelled_networks
from weightsym import discover, permute, random_permutations
from weightsym import params as P


def test_a_bank_as_a_data_set(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    sym = discover(net, torch.randn(5, 3))
    networks = P.populate(net, 6)
    moved = permute(networks, sym, random_permutations(sym, torch.Generator().manual_seed(0), 6))
    banks = [CheckpointBank(tmp_path / name) for name in "ab"]
    for bank, stack in zip(banks, (networks, moved), strict=True):
        bank.extend(stack, [{"step": k, "metrics": {"acc": k / 7}} for k in range(6)])
    a, b = (labelled_networks(bank, "metrics.acc", sym) for bank in banks)
    torch.testing.assert_close(a[:], b[:])
    assert a[:][1].tolist() == pytest.approx([k / 7 for k in range(6)])
    raw = [labelled_networks(bank, "step") for bank in banks]
    assert not torch.allclose(raw[0][:][0], raw[1][:][0])
    assert raw[0][5][1] == 5
    with pytest.raises(ValueError, match="'metrics' is not a number in every record"):
        labelled_networks(banks[0], "metrics")

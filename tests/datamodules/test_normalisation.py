"""Normalisation in pieces gives the same numbers as all at once."""

import pytest
import torch

from lightning_bnn.datamodules import preprocessing as normalisation
from lightning_bnn.datamodules.preprocessing import normalise

MEAN, STD = (0.1, 0.5, 0.3), (0.2, 0.7, 1.5)


def written_out(inputs):
    numbers = inputs.to(torch.get_default_dtype()) / 255 if inputs.dtype == torch.uint8 else inputs
    mean, std = (torch.tensor(v, dtype=numbers.dtype)[:, None, None] for v in (MEAN, STD))
    return (numbers - mean) / std


@pytest.mark.parametrize("lead", [(), (1,), (7,), (3, 5), (0,), (2, 0)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_pieces_have_the_same_numbers(lead, dtype, monkeypatch):
    monkeypatch.setattr(normalisation, "AT_ONCE", 100)  # three images at most
    inputs = torch.randint(256, (*lead, 3, 4, 5)).to(dtype)
    given = inputs.clone()
    assert torch.equal(normalise(inputs, MEAN, STD), written_out(inputs))
    assert torch.equal(inputs, given)


def test_inputs_may_lie_across_each_other_in_memory(monkeypatch):
    monkeypatch.setattr(normalisation, "AT_ONCE", 100)
    inputs = torch.randint(256, (6, 4, 5, 3), dtype=torch.uint8).movedim(-1, 1)
    assert torch.equal(normalise(inputs, MEAN, STD), written_out(inputs))


def test_without_means_bytes_are_divided_and_numbers_stay():
    numbers = torch.randn(3, 2)
    assert normalise(numbers) is numbers
    assert torch.equal(normalise(torch.tensor([255, 0], dtype=torch.uint8)), torch.tensor([1.0, 0]))

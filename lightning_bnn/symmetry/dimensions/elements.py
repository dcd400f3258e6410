"""Random elements of the groups that were read, applied along label arrays."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_bnn.params import Params
from lightning_bnn.symmetry.dimensions.engine import Dimensions
from lightning_bnn.symmetry.dimensions.exchanges import Exchange
from lightning_bnn.symmetry.dimensions.scales import Units
from lightning_bnn.symmetry.dimensions.values import Ints, Part, occurrence

__all__ = ["exchanged", "flipped", "rescaled"]


def rescaled(params: Params, read: Dimensions, log_scales: Tensor) -> Params:
    """Multiply every weight by the scales of its labels, given the logs of the free ones."""
    result = dict(params)
    for name, own in read.reading.parameters.items():
        total = _total(own.parts, read.scales, log_scales.to(torch.float64), "power")
        result[name] = params[name] * torch.exp(total).to(params[name])
    return result


def flipped(params: Params, read: Dimensions, signs: Tensor) -> Params:
    """Multiply every weight by the signs of its labels, given the free ones as 0 or 1."""
    result = dict(params)
    for name, own in read.reading.parameters.items():
        total = _total(own.parts, read.signs, signs.to(torch.float64), "parity")
        result[name] = params[name] * (1 - 2 * (total % 2)).to(params[name])
    return result


def _total(parts: tuple[Part, ...], units: Units, numbers: Tensor, exponent: str) -> Tensor:
    """The sum over parts of what free variables add up to for every label."""
    total = torch.zeros((), dtype=torch.float64)
    for part in parts:
        labels, index = torch.unique(part.labels, return_inverse=True)
        values = [
            sum(float(c) * float(numbers[v]) for v, c in units.of(label).items())
            for label in labels.tolist()
        ]
        own = torch.tensor(values, dtype=torch.float64)[index]
        total = total + own * float(getattr(part, exponent))
    return total


def exchanged(params: Params, read: Dimensions, group: Exchange, i: int, j: int) -> Params:
    """Let two units of a group change places.

    Every entry of a tensor goes where its labels go; entries that no label tells apart keep their
    order.

    Raises:
        ValueError: the entries of a tensor do not match those of the tensor that they go to.
    """
    found = read.exchanges
    names = list(read.reading.parameters)
    first = found.class_count + len(read.reading.operations)
    image = np.arange(first + len(names))
    image[group.units[i]], image[group.units[j]] = group.units[j], group.units[i]
    result, still = dict(params), np.arange(len(image))
    for k, name in enumerate(names):
        target = names[int(image[first + k]) - first]
        ours = _codes(read, name, found.classes, image)
        theirs = _codes(read, target, found.classes, still)
        a, b = np.lexsort(ours.T[::-1]), np.lexsort(theirs.T[::-1])
        if not np.array_equal(ours[a], theirs[b]):
            raise ValueError(f"{name!r} cannot take the place of {target!r}.")
        moved = torch.empty_like(params[name]).reshape(-1)
        moved[torch.from_numpy(b)] = params[name].reshape(-1)[torch.from_numpy(a)]
        result[target] = moved.reshape(params[target].shape)
    return result


def _codes(read: Dimensions, name: str, classes: Ints, image: Ints) -> Ints:
    """By entry, in rows: for every part the class that its label goes to, and its occurrence."""
    own = read.reading.parameters[name]
    columns = []
    for part in own.parts:
        labels = part.labels.numpy()
        again = occurrence(torch.from_numpy(classes[labels]))
        again = again if len(part.dims) <= 1 else torch.zeros_like(again)
        columns += [np.broadcast_to(image[classes[labels]], own.shape).ravel()]
        columns += [np.broadcast_to(again.numpy(), own.shape).ravel()]
    return np.stack(columns, 1)

"""Stacks of chains, some of them random, and what a loop over their networks gives."""

import torch
from torch import nn
from torch.func import functional_call

from weightsym import params as P
from weightsym.networks.engines import Outputs, engine_for

EXAMPLES, MEMBERS, SHAPE = 11, 3, (2, 9, 11)
ACTIVATIONS = [nn.ReLU, lambda: nn.LeakyReLU(0.2), nn.Tanh, nn.GELU, nn.SiLU, nn.ELU,
               lambda: nn.GELU("tanh"), lambda: nn.ReLU(inplace=True), nn.Identity,
               nn.ReLU6, nn.Hardswish, nn.Softplus, nn.Mish]  # fmt: skip


def chain(dice):
    """A random network and the shape of its examples."""
    whole = dice.randint
    channels, size = whole(1, 4), [whole(6, 13), whole(6, 13)]
    shape, layers = (channels, *size), []
    for _ in range(whole(0, 2)):
        layer, channels = _convolution(whole, channels, size)
        layers += [layer, dice.choice(ACTIVATIONS)()]
        size = _size(layers, shape)
        if whole(0, 2):
            layers.append(_pooling(whole, size))
            size = _size(layers, shape)
    layers.append(nn.Flatten())
    for _ in range(whole(0 if len(layers) > 1 else 1, 2)):
        features = nn.Sequential(*layers)(torch.zeros(1, *shape)).shape[1]
        layers += [nn.Linear(features, whole(1, 7), bool(whole(0, 1)))]
        layers.append(dice.choice(ACTIVATIONS)())
    return nn.Sequential(*layers), shape


def _convolution(whole, channels, size):
    groups = [g for g in range(1, channels + 1) if channels % g == 0][whole(0, 1) - 1]
    outputs = groups * whole(1, 4)
    padding = [whole(0, 2), whole(0, 2)]
    dilation = [whole(1, 2), whole(1, 2)]
    kernel = [
        whole(1, min(4, (n + 2 * p - 1) // d + 1))
        for n, p, d in zip(size, padding, dilation, strict=True)
    ]
    layer = nn.Conv2d(
        channels, outputs, kernel, (whole(1, 2), whole(1, 3)), padding, dilation, groups,
        bias=bool(whole(0, 1)),
    )  # fmt: skip
    return layer, outputs


def _pooling(whole, size):
    window = [whole(1, min(3, n)) for n in size]
    step = [whole(1, 3), whole(1, 3)]
    kinds = [
        nn.MaxPool2d(window, step),
        nn.MaxPool2d(window),
        nn.AvgPool2d(window, step),
        nn.AvgPool2d(window),
        nn.AdaptiveAvgPool2d(1),
        nn.AdaptiveMaxPool2d(1),
    ]
    return kinds[whole(0, 5)]


def _size(layers, shape):
    return nn.Sequential(*layers)(torch.zeros(1, *shape)).shape[2:]


def made(model, own=False, dtype=torch.float64, examples=EXAMPLES, shape=SHAPE):
    """A stack of a network, and inputs."""
    model = model.to(dtype)
    generator = torch.Generator().manual_seed(1)
    stack = {n: t.to(dtype) for n, t in P.populate(model, MEMBERS, generator).items()}
    lead = (MEMBERS, examples) if own else (examples,)
    x = torch.randn(*lead, *shape, generator=generator, dtype=dtype)
    trained = {n for n, _ in model.named_parameters()}
    stack = {n: t.requires_grad_(n in trained) for n, t in stack.items()}
    return model, stack, x.requires_grad_()


def chain_of(model, stack, inputs, own=False):
    """The chain by which machine code runs a stack, None if it does not."""
    job = Outputs(model, stack, P.apply, inputs, own)
    return job.notes["chain"] if engine_for(job) is not None else None


def both(model, stack, x, own=False):
    """Outputs and gradients of all weights and inputs, of ours and of the loop."""
    run = P.apply_each if own else P.apply
    leaves = [x, *(t for t in stack.values() if t.requires_grad)]
    ours, theirs = run(model, stack, x), looped(model, stack, x, own)
    return [(ours, theirs), *zip(gradients(ours, leaves), gradients(theirs, leaves), strict=True)]


def looped(model, stack, x, own):
    """Outputs of the networks, one by one."""
    members = len(next(iter(stack.values())))
    rows = [
        functional_call(model, {n: t[m] for n, t in stack.items()}, (x[m] if own else x,))
        for m in range(members)
    ]
    return torch.stack(rows)


def gradients(outputs, leaves):
    """Of a sum with weights, which tell the outputs apart."""
    weights = torch.linspace(-1, 2, outputs.numel(), dtype=outputs.dtype).view_as(outputs)
    return torch.autograd.grad((outputs * weights).sum(), leaves, allow_unused=True)


def error(found, wanted):
    """The largest error, relative to the largest number."""
    scale = wanted.abs().max().clamp(min=1e-30)
    return ((found - wanted).abs().max() / scale).item()

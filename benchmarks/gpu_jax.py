"""Sequential networks of torch in JAX, trained by `vmap` and `jit`, for `gpu_populations.py`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch import nn

RATE, DECAY = 0.04, 2e-4
AT_ONCE = 10_000
SCANNED, FEW = 32, 2
"""Steps of a scan of few networks, and of many."""


def forward(network, params, x):
    """What a `torch.nn.Sequential` returns."""
    for name, layer in network.named_children():
        own = {n: params[f"{name}.{n}"] for n, _ in layer.named_parameters()}
        x = LAYERS[type(layer)](layer, own, x)
    return x


def _convolution(layer, own, x):
    return lax.conv_general_dilated(
        x, own["weight"], layer.stride, "VALID", feature_group_count=layer.groups,
        dimension_numbers=("NCHW", "OIHW", "NCHW"),
    )  # fmt: skip


def _pooling(layer, own, x):
    size = (1, 1, layer.kernel_size, layer.kernel_size)
    return lax.reduce_window(x, -jnp.inf, lax.max, size, size, "VALID")


LAYERS = {
    nn.Conv2d: _convolution,
    nn.MaxPool2d: _pooling,
    nn.Linear: lambda layer, own, x: x @ own["weight"].T + own["bias"],
    nn.ReLU: lambda layer, own, x: jax.nn.relu(x),
    nn.Tanh: lambda layer, own, x: jnp.tanh(x),
    nn.AdaptiveAvgPool2d: lambda layer, own, x: x.mean((2, 3), keepdims=True),
    nn.Flatten: lambda layer, own, x: x.reshape(len(x), -1),
}


def array(tensor):
    return jnp.array(tensor.detach().cpu().numpy())


def _update(network):
    """A step of SGD of a stack, in chunks where it is large."""

    def loss(params, x, y):
        logits = jax.nn.log_softmax(forward(network, params, x))
        return -jnp.take_along_axis(logits, y[:, None], 1).mean()

    def of_one(params, x, y):
        grads = jax.grad(loss)(params, x, y)
        return {n: (1 - RATE * DECAY) * t - RATE * grads[n] for n, t in params.items()}

    def update(stack, x, y):
        members = len(next(iter(stack.values())))
        if members <= AT_ONCE:
            return jax.vmap(of_one, (0, None, None))(stack, x, y)
        return lax.map(lambda one: of_one(one, x, y), stack, batch_size=AT_ONCE)

    return update


def _started(network, stack):
    return [{n: array(t) for n, t in stack.items()}]


def _weights(box, names):
    arrays = [np.asarray(box[0][n]).reshape(len(box[0][n]), -1) for n in names]
    return torch.from_numpy(np.concatenate(arrays, 1).copy())


def scanned(network, stack):
    """A call for many steps, on the same batch."""
    steps = SCANNED if len(next(iter(stack.values()))) < AT_ONCE else FEW
    box, one = _started(network, stack), _update(network)

    @functools.partial(jax.jit, donate_argnums=0)
    def update(stack, x, y):
        return lax.scan(lambda s, _: (one(s, x, y), None), stack, length=steps)[0]

    arrays = functools.cache(lambda x, y: (array(x), array(y)))

    def step(x, y):
        box[0] = update(box[0], *arrays(x, y))

    step.wait, step.steps = lambda: jax.block_until_ready(box[0]), steps
    return step, lambda: _weights(box, stack)

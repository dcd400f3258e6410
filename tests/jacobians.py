"""The continuous symmetries of a network, counted in the kernel of its Jacobian.

A direction of weights along which no output moves, at generic weights and inputs, belongs to a
symmetry. Nothing of the package takes part in the count.
"""

import numpy as np
import torch

__all__ = ["kernel_dimension"]


def kernel_dimension(network, *inputs):
    """Trained weights minus the rank of the Jacobian of the outputs, which must be beyond doubt."""
    weights = [p for p in network.parameters() if p.requires_grad]
    outputs = network(*inputs).flatten()
    touched = torch.autograd.grad(outputs.sum(), weights, retain_graph=True, allow_unused=True)
    weights = [w for w, slope in zip(weights, touched, strict=True) if slope is not None]
    numbers = sum(w.numel() for w in weights)
    assert len(outputs) > 1.2 * numbers
    outputs = outputs[torch.randperm(len(outputs))[: numbers + max(numbers // 4, 40)]]
    basis = torch.eye(len(outputs), dtype=outputs.dtype)
    parts = torch.autograd.grad(outputs, weights, basis, is_grads_batched=True)
    jacobian = torch.cat([part.flatten(1) for part in parts], 1).numpy()
    values = np.linalg.svd(jacobian, compute_uv=False)
    rank = int((values > 1e-10 * values[0]).sum())
    if rank < numbers:
        assert values[rank - 1] > 1e4 * values[rank], "no clear gap in the singular values"
    return numbers - rank

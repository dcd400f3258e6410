"""`weightsym match`: bring a network on disk into the frame of another one."""

from __future__ import annotations

from typing import Literal

from weightsym import Outcome
from weightsym.commands.architecture import Architecture
from weightsym.commands.merge import merge


def match(
    a: str,
    b: str,
    architecture: Architecture,
    out: str | None = None,
    method: Literal["reference", "mixing"] = "reference",
    data: str | None = None,
    others: Literal["refuse", "copy"] = "refuse",
    overwrite: bool = False,
) -> Outcome:
    """Bring network A into the frame of network B: `merge` of B and A with the weights 0 and 1.

    The written file computes the same function as A, has the names, types and metadata of A, and
    can be averaged with B.

    Args:
        a: network to move: .safetensors, .ckpt, .pt, or a folder of Hugging Face (config.json
            beside model.safetensors or its shards).
        b: network to which A is matched.
        architecture: options that specify the network.
        out: output, a .safetensors file, or a folder if A is one; by default only numbers are
            printed. For example: weightsym match a.safetensors b.safetensors --out
            c.safetensors --network torchvision.models.resnet18 --input 1,3,224,224
        method: reference matches by permutations and signs; mixing also by matrices that mix the
            channels of heads, streams and adapters.
        data: data for the loss barrier before and after: import path of a LightningDataModule, a
            configuration (.yaml), or a .pt or .safetensors file with inputs and targets.
        others: treatment of tensors in A that do not belong to the network: refuse or copy.
        overwrite: replace an existing file or folder at --out (true or false).
    """
    weights = [0.0, 1.0]
    return merge([b, a], architecture, out, weights, None, method, data, None, others, overwrite)

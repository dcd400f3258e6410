"""Networks of Hugging Face folders: of the class that a configuration names, without weights."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn.commands.named_networks import code_of_the_user, example_of
from lightning_bnn.weight_files import NetworkNames
from lightning_bnn.weight_files.hugging_face import read_json

__all__ = ["names_in_files", "transformers_example", "transformers_network"]

_TOKENS, _ROWS = 8, 2


def transformers_network(folder: Path) -> nn.Module:
    """A network of the class in ``config.json``; code that lies in the folder is never run.

    Args:
        folder: with a ``config.json``.
    """
    transformers = _transformers(folder)
    settings = read_json(folder / "config.json")
    if settings.get("quantization_config"):
        raise ValueError(f"{folder} is quantised, and quantised networks are not read.")
    names = settings.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    kind: Any = getattr(transformers, name, None) if isinstance(name, str) else None
    is_network = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    if not is_network:
        raise ValueError(
            f"{folder / 'config.json'} names {name!r}, which is no network of transformers "
            f"{transformers.__version__}; name its class by `--network`."
        )
    with code_of_the_user(f"transformers cannot make the {name} of {folder}:"):
        config = kind.config_class.from_dict(settings)
        config._attn_implementation, config.use_cache = "eager", False
        network = kind(config).float().eval()
    assert isinstance(network, nn.Module)
    return network


def _transformers(folder: Path) -> Any:
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        raise ValueError(
            f"{folder} is a folder of Hugging Face: install transformers, or name the class of "
            "the network by `--network` and the shape of its input by `--input`."
        ) from None
    transformers.logging.set_verbosity_error()
    return transformers


def transformers_example(network: Any, text: str) -> tuple[Tensor, ...]:
    """Inputs: of the shapes that the user has written, or tokens or images by the configuration."""
    if text:
        return example_of(text)
    config, name = network.config, getattr(network, "main_input_name", None)
    if name == "input_ids" and getattr(config, "vocab_size", None):
        return (torch.randint(0, config.vocab_size, (_ROWS, _TOKENS)),)
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", None)
    if name == "pixel_values" and isinstance(size, int) and isinstance(channels, int):
        return (torch.randn(_ROWS, channels, size, size),)
    raise ValueError(
        f"`--input` is missing: what {type(network).__name__} takes ({name}) does not follow from "
        "its configuration; give its shape, e.g. --input 1,3,224,224"
    )


def names_in_files(network: nn.Module) -> NetworkNames:
    """What the network calls its tensors, with what files of transformers may leave out."""
    ignored = getattr(network, "_keys_to_ignore_on_load_unexpected", None) or ()
    return NetworkNames.of(network, getattr(network, "base_model_prefix", ""), sorted(ignored))

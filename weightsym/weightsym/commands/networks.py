"""Networks from import paths, arguments and shapes, and their tensors in files."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from weightsym import Symmetries, discover
from weightsym import params as P
from weightsym.commands.architecture import Architecture
from weightsym.commands.mistakes import building
from weightsym.extras import of_the_plug_in
from weightsym.files import NetworkNames, fit
from weightsym.groups.placements import Axis
from weightsym.networks.dicts import Computed
from weightsym.networks.files.fitting import FittedNetwork, Others
from weightsym.networks.files.loading import read_json
from weightsym.networks.files.stored import StoredNetwork
from weightsym.networks.meta import matrices_on_meta

T = TypeVar("T")
_TOKENS, _ROWS = 8, 2
_TOKENS_SEEN = 61
"""Number of tokens of a longer table for the search of symmetries."""
_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64)


def build(
    architecture: Architecture, folder: Path | None
) -> tuple[nn.Module, tuple[Tensor, ...], NetworkNames]:
    """Build a network and an example of its input, and list its names in files.

    Args:
        architecture: options of the user.
        folder: of Hugging Face, used if the options do not specify the network.
    """
    torch.manual_seed(architecture.seed)
    path, text = architecture.network, architecture.input
    if path is None:
        if folder is None:
            raise ValueError(
                "`--network` is missing: give the import path of the class of the networks, e.g. "
                "--network torchvision.models.resnet18 --input 1,3,224,224"
            )
        module = transformers_network(folder)
        example = transformers_example(module, text)
    elif Path(path).suffix in (".yaml", ".yml"):
        code = of_the_plug_in("evaluation.problem", f"`--network {path}`")
        with building(f"What {path} describes"):
            problem = code.read_problem(Path(path))
            module = problem.network
            example = example_of(text) if text else (problem.example(),)
    else:
        example = example_of(text)
        module = network_of(path, architecture.init or {})
    return module.eval(), example, names_in_files(module)


# ------------------------------------------------------------ input
def example_of(text: str) -> tuple[Tensor, ...]:
    """Create random inputs with the user's shapes and types.

    Args:
        text: sizes such as 1,3,224,224, with a type after a colon, several separated by ;
    """
    if not text:
        raise ValueError(
            "`--input` is missing: give the shape of the input, e.g. --input 1,3,224,224"
        )
    return tuple(_tensor(item) for item in text.split(";"))


def _tensor(text: str) -> Tensor:
    shape, _, type_name = text.partition(":")
    dtype = getattr(torch, type_name or "float32", None)
    try:
        sizes = [int(n) for n in shape.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1 or math.prod(sizes) > 2**31 or dtype not in _TYPES:
        raise ValueError(
            f"`--input` must be positive sizes with an optional type, like 1,3,224,224 or "
            f"2,16:int64, got {text!r}."
        )
    if dtype.is_floating_point:
        return torch.randn(sizes, dtype=dtype)
    return torch.randint(0, 2, sizes, dtype=dtype)


# ------------------------------------------------------------ network
def network_of(path: str, init: Mapping[str, Any]) -> nn.Module:
    """Return the network that a class or function creates.

    Args:
        path: import path.
        init: its arguments.
    """
    factory = imported(path)
    if not callable(factory):
        raise ValueError(
            f"`{path}` is a {type(factory).__name__}, not a class or function that returns "
            "a network."
        )
    if isinstance(factory, nn.Module):
        return factory
    try:
        if inspect.isclass(factory) or inspect.isfunction(factory):
            inspect.signature(factory).bind(**init)
    except TypeError as error:
        raise ValueError(
            f"`{path}` cannot be called with {dict(init)}: {error}. Pass its arguments by --init."
        ) from error
    with code_of_the_user(f"`{path}` raised"):
        model = factory(**init)
    if not isinstance(model, nn.Module):
        raise ValueError(f"`{path}` returned a {type(model).__name__}, not a torch.nn.Module.")
    return model


@contextlib.contextmanager
def code_of_the_user(title: str) -> Iterator[None]:
    """Turn an error in the user's own code into one sentence."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise ValueError(f"{title} {type(error).__name__}: {error}") from error


def imported(path: str) -> Any:
    """Import an object by its path, or explain why that fails."""
    name_of_module, _, name = path.replace(".py:", ".").replace(":", ".").rpartition(".")
    if not name_of_module:
        raise ValueError(f"`{path}` is not an import path: write package.module.Class.")
    with code_of_the_user(f"`{path}` cannot be imported:"):
        module = importlib.import_module(name_of_module)
    if not hasattr(module, name):
        hint = f": write {name_of_module}.NAME" if name == "py" else "."
        raise ValueError(f"There is no {name!r} in `{name_of_module}`{hint}")
    return getattr(module, name)


# ------------------------------------------------------------ transformers
def transformers_network(folder: Path) -> nn.Module:
    """Create a network of the class in ``config.json``, without running code of the folder.

    Its matrices are on the meta device: their numbers are in files, and take no memory.

    Args:
        folder: with a ``config.json``.
    """
    transformers = _transformers(folder)
    settings = read_json(folder / "config.json")
    if settings.get("quantization_config"):
        raise ValueError(f"{folder} is quantised, which is not supported.")
    names = settings.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    model_class: Any = getattr(transformers, name, None) if isinstance(name, str) else None
    is_network = isinstance(model_class, type) and issubclass(
        model_class, transformers.PreTrainedModel
    )
    if not is_network:
        raise ValueError(
            f"{folder / 'config.json'} names {name!r}, which is not a network of "
            f"transformers {transformers.__version__}; specify its class by `--network`."
        )
    with code_of_the_user(f"transformers cannot make the {name} of {folder}:"):
        config = model_class.config_class.from_dict(settings)
        config._attn_implementation, config.use_cache = "eager", False
        with matrices_on_meta():
            network = model_class(config)
        if any(p.is_meta and not p.requires_grad for p in network.parameters()):
            network = model_class(config)  # files may lack what it computes and never trains
        network = network.float().eval()
    assert isinstance(network, nn.Module)
    return network


def _transformers(folder: Path) -> Any:
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        raise ValueError(
            f"{folder} is a folder of Hugging Face: install transformers, or specify the "
            "class of the network by `--network` and the shape of its input by `--input`."
        ) from None
    transformers.logging.set_verbosity_error()
    return transformers


def transformers_example(network: Any, text: str) -> tuple[Tensor, ...]:
    """Create inputs with the user's shapes, or tokens or images from the configuration."""
    if text:
        return example_of(text)
    config, name = network.config, getattr(network, "main_input_name", None)
    if name == "input_ids" and getattr(config, "vocab_size", None):
        return (torch.randint(0, config.vocab_size, (_ROWS, _TOKENS)),)
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", None)
    if name == "pixel_values" and isinstance(size, int) and isinstance(channels, int):
        return (torch.randn(_ROWS, channels, size, size),)
    raise ValueError(
        f"`--input` is missing: the configuration does not define the input {name} of "
        f"{type(network).__name__}; specify its shape, e.g. --input 1,3,224,224"
    )


def symmetries_in(network: nn.Module, *example: Tensor, **options: Any) -> Symmetries:
    """Find the symmetries of a network; for one of transformers, with few of its tokens.

    The rows of a table of tokens are all alike, and no group moves them, so that a few suffice.

    Args:
        network: any network.
        *example: of its input.
        **options: of `discover`.
    """
    short = _with_few_tokens(network)
    if short is not None:
        few = tuple(x if x.is_floating_point() else x % _TOKENS_SEEN for x in example)
        sym = discover(short, *few, **options)
        longer = {name: t.shape for name, t in P.of(network).items() if name in sym.shapes}
        whole = replace(sym, axes=_longer_axes(sym, longer), shapes={**sym.shapes, **longer})
        changed = {a for a, axis in enumerate(sym.axes) if axis != whole.axes[a]}
        others = {name for name, shape in sym.shapes.items() if shape != whole.shapes[name]}
        others &= {axis.tensor for axis in sym.axes if axis.dim is None} | sym.constants.keys()
        if not (others or changed & _moved_axes(sym)):
            return whole
    return discover(network, *example, **options)


def _longer_axes(sym: Symmetries, shapes: Mapping[str, torch.Size]) -> tuple[Axis, ...]:
    """Return the axes of tensors with different shapes."""

    def longer(axis: Axis) -> Axis:
        old, new = sym.shapes[axis.tensor], shapes[axis.tensor]
        is_same = axis.dim is None or old[axis.dim] == new[axis.dim]
        return axis if is_same else replace(axis, size=new[axis.dim or 0])

    return tuple(map(longer, sym.axes))


def _moved_axes(sym: Symmetries) -> set[int]:
    kinds = (sym.permutations, sym.scalings, sym.signs, sym.linear, sym.shifts)
    readers = (reader.channels for group in sym.shifts for reader in group.readers)
    placements = itertools.chain(*(group.placements for row in kinds for group in row), readers)
    return {placement.axis for placement in placements}


def _with_few_tokens(network: Any) -> nn.Module | None:
    """Return the network with the first tokens only, or None if it has few or none."""
    tables = getattr(network, "resize_token_embeddings", None)
    size = getattr(getattr(network, "config", None), "vocab_size", None)
    if tables is None or not isinstance(size, int) or size <= _TOKENS_SEEN:
        return None
    short = copy.deepcopy(network)
    try:
        short.resize_token_embeddings(_TOKENS_SEEN, mean_resizing=False)
    except Exception:  # of a class that has tables of its own
        return None
    assert isinstance(short, nn.Module)
    return short.eval()


def names_in_files(network: nn.Module) -> NetworkNames:
    """List the names of tensors, and the names that files of transformers may omit."""
    ignored = getattr(network, "_keys_to_ignore_on_load_unexpected", None) or ()
    return NetworkNames.of(network, getattr(network, "base_model_prefix", ""), sorted(ignored))


# ------------------------------------------------------------ files
def numbers(file: FittedNetwork) -> Mapping[str, Tensor]:
    """Return the tensors of a network on disk for computation, each read when it is needed."""
    return Computed(tuple(file.places), file.number, file)


def fit_all(
    stored: Sequence[StoredNetwork], names: NetworkNames, prefix: str | None, others: Others
) -> list[FittedNetwork]:
    """Find the tensors of a network in every file.

    Args:
        stored: opened files or folders.
        names: of the network.
        prefix: prefix of the names in files that have it, unless none has it.
        others: treatment of tensors that do not belong to the network: refuse or copy.
    """
    having = [bool(prefix) and any(n.startswith(prefix or "") for n in s.tensors) for s in stored]
    return [
        fit(file, names, prefix if has or not any(having) else None, others)
        for file, has in zip(stored, having, strict=True)
    ]


def shown(steps: Iterable[T], title: str) -> Iterable[T]:
    """Iterate with a progress bar on a terminal."""
    return tqdm(list(steps), desc=title, leave=False, disable=not sys.stderr.isatty())

"""`weightsym merge`: networks on disk, brought into one frame and averaged."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from weightsym import Element, Outcome, Symmetries, align, match
from weightsym import params as P
from weightsym.commands.architecture import Architecture
from weightsym.commands.examples import ExampleBatches, examples_of, loss
from weightsym.commands.networks import build, fit_all, shown, symmetries_in
from weightsym.commands.outputs import Output
from weightsym.extras import of_the_plug_in
from weightsym.files import NetworkNames, open_network
from weightsym.matching.align import distance_to_mean
from weightsym.matching.interpolation import mean_loss
from weightsym.matching.match_all import Frame, in_frame
from weightsym.matching.moved import Moved, inner_products
from weightsym.matching.plan import plan_of
from weightsym.matching.repair import reestimated
from weightsym.networks.batch_norms import batch_norms
from weightsym.networks.dicts import Computed
from weightsym.networks.files import checkpoints
from weightsym.networks.files.fitting import FittedNetwork, are_finite
from weightsym.networks.files.stored import StoredNetwork, is_hugging_face
from weightsym.params import Params, shares, unstack, weighted_mean
from weightsym.params import stack as join

_HALF = (torch.float16, torch.bfloat16)
_AT_ONCE = 2**20
"""Number of entries of a tensor, of all networks together, that are averaged at once."""
_LARGE = 2**26
"""Bytes of all networks in single precision above which they stay on disk."""
_SWEEPS = 5
"""Number of times that each of several large networks is matched to the mean of the others."""
_GAIN = 1e-6  # of the similarity; less is rounding


def merge(
    sources: list[str],
    architecture: Architecture,
    out: str | None = None,
    weights: list[float] | None = None,
    last: int | None = None,
    method: Literal["joint", "reference", "mixing", "plain"] = "joint",
    data: str | None = None,
    like: str | None = None,
    others: Literal["refuse", "copy"] = "refuse",
    overwrite: bool = False,
) -> Outcome:
    """Average networks after bringing all of them into the frame of the first one.

    Units are permuted, flipped and mixed, but not rescaled: networks with different scales stay far
    apart in every frame, even if their functions are equal.

    Args:
        sources: at least two networks: .safetensors, .ckpt and .pt files, folders of Hugging Face
            (config.json beside model.safetensors or its shards), banks, and folders that contain
            checkpoints at any depth, such as those of runs.
        architecture: options that specify the network.
        out: output: a .safetensors or .pt file, a .ckpt that Lightning loads, or a folder if the
            form is that of one; by default only numbers are printed. For example:
            weightsym merge a.safetensors b.safetensors runs/c/bank --weights 0.5 0.3 0.2
            --out d.safetensors --network torchvision.models.resnet18 --input 1,3,224,224
        weights: weight of each source, e.g. 0.5 0.3 0.2, divided among its networks; by default all
            networks have equal weights. 0 1 writes the second one in the frame of the first.
        last: number of networks of each bank or folder, counted from the end; by default all.
        method: joint matches every network to the sum of the others, by permutations and signs;
            reference matches all to the first; mixing also matches heads, streams and adapters by
            matrices, large networks to the first only; plain averages without matching.
        data: data for re-estimating the statistics of batch norms and evaluating the average:
            import path of a LightningDataModule, a configuration (.yaml), or a .pt or .safetensors
            file with inputs and targets.
        like: file or folder that provides names, types, other tensors and settings of the output;
            by default the first source with a weight that is one network, for a .ckpt the first
            .ckpt.
        others: treatment of tensors in files that do not belong to the network: refuse, or copy
            those of the form.
        overwrite: replace an existing file or folder at --out (true or false).
    """
    paths = [Path(source) for source in sources]
    stored = [file for p in [*([Path(like)] if like else []), *paths] for file in _opened(p)]
    module, example, names = build(architecture, next(filter(is_hugging_face, paths), None))
    single = [s for s in stored if architecture.prefix is not None or not _has_members(s, names)]
    files = {f.stored.path: f for f in fit_all(single, names, architecture.prefix, others)}
    counting = [p for k, p in enumerate(paths) if weights is None or weights[k : k + 1] != [0.0]]
    form = _form(out, [files.get(Path(like))] if like else [files.get(p) for p in counting], like)
    output = Output.checked(out, form, files.values(), overwrite)
    examples = examples_of(data) if data is not None else None
    contents = [_read(p, files.get(p), module, last, architecture.prefix) for p in paths]
    average = _Average(module, *_together(contents, weights), examples)
    print(average.describe(), flush=True)
    before = after = average.numbers()
    print("\n".join(f"{name}: {value:.6g}" for name, value in before.items()), flush=True)
    if method != "plain":
        sym = symmetries_in(module, *example, batch_norm=architecture.batch_norm)
        print(f"\n{sym}\n", flush=True)
        average.align(sym, method, architecture.seed)
        after = average.numbers()
        print("\n".join(f"{name}: {before[name]:.6g} -> {after[name]:.6g}" for name in after))
    mean = average.mean()
    if output is not None:
        output.write(average.every.names, mean)
    content = {"networks": len(average.weights), "parameters": average.size, "out": out}
    return Outcome({**content, "weights": average.weights, "before": before, "after": after})


# ------------------------------------------------------------ reading
def _opened(path: Path) -> list[StoredNetwork]:
    """Open a file or folder of Hugging Face, and refuse damaged banks and folders."""
    if path.is_file() or is_hugging_face(path) or not path.exists():
        return [open_network(path)]
    if is_bank(path):
        _reader(path).CheckpointBank(path, "r")
    else:
        for file in checkpoints.checkpoint_files(path):
            open_network(file)
    return []


def is_bank(path: Path) -> bool:
    """Tell whether a folder is a bank of networks.

    Args:
        path: of the folder.
    """
    return (path / "manifest.jsonl").is_file()


def _reader(path: Path) -> ModuleType:
    """Choose the reader for a bank or a folder of checkpoints."""
    return of_the_plug_in("bank", f"The bank {path}") if is_bank(path) else checkpoints


def _has_members(stored: StoredNetwork, names: NetworkNames) -> bool:
    """Check whether a file is of a module of this package, with a stack of networks."""
    name, tensor = next(iter(names.tensors.items()))
    member = stored.tensors.get(f"state.networks.{name}")
    return member is not None and member.shape[1:] == tensor.shape


def _read(
    path: Path, file: FittedNetwork | None, module: nn.Module, last: int | None, prefix: str | None
) -> list[Mapping[str, Tensor]]:
    """Return the networks of a source; those of a file or folder stay on disk."""
    if file is not None:
        return [file]
    stack = _reader(path).read_networks(path, module, last, prefix)[0]
    for name, tensor in stack.items():
        if tensor.is_floating_point() and not are_finite(tensor):
            raise ValueError(f"{path}: {name!r} holds NaN or infinite values.")
    return list(unstack(stack))


def _together(
    sources: Sequence[list[Mapping[str, Tensor]]], weights: Sequence[float] | None
) -> tuple[Every, list[float]]:
    """Return all networks, with the weight of every source divided among its networks."""
    networks = [network for source in sources for network in source]
    if len(networks) < 2:
        raise ValueError(f"`sources` must hold at least two networks, got {len(networks)}.")
    if weights is None:
        return Every(networks), shares(None, len(networks))
    by_source = zip(shares(weights, len(sources), "`--weights`"), sources, strict=True)
    return Every(networks), [w / len(source) for w, source in by_source for _ in source]


class Every:
    """All networks, of which one tensor is read, moved and held at a time.

    Attributes:
        networks: in memory or on disk.
        moved: the same after an element, of each network.
        names: of their tensors.
    """

    def __init__(self, networks: Sequence[Mapping[str, Tensor]]) -> None:
        self.networks, self.moved = list(networks), list(networks)
        self.names = list(networks[0])

    def move(self, k: int, element: Element) -> None:
        """Let an element act on one network as it was given."""
        self.moved[k] = Moved(self.networks[k], element)

    def member(self, k: int) -> Params:
        """Return one complete network."""
        return {name: _wide(self.moved[k][name]) for name in self.names}

    def parts(self, name: str, weights: Sequence[float] | None = None) -> Iterator[Tensor]:
        """Yield one tensor of networks in at least single precision, a few entries at a time.

        Args:
            name: of the tensor.
            weights: of all networks, of which those without one are left out.
        """
        chosen = [k for k in range(len(self.networks)) if weights is None or weights[k]]
        rows = [self.moved[k][name].reshape(-1) for k in chosen]
        wide = functools.reduce(torch.promote_types, (row.dtype for row in rows))
        step = max(1, _AT_ONCE // len(rows))
        for first in range(0, max(1, len(rows[0])), step):
            some = [row[first : first + step].to(wide) for row in rows]
            yield _wide(torch.stack(some))

    def mean(self, name: str, weights: Sequence[float]) -> Tensor:
        """Return one tensor of the mean."""
        counting, mean, end = [w for w in weights if w], None, 0
        for piece in self.parts(name, weights):
            part = weighted_mean({name: piece}, counting)[name]
            mean = part.new_empty(self.shape(name).numel()) if mean is None else mean
            mean[end : end + len(part)] = part
            end += len(part)
        assert mean is not None
        return mean.reshape(self.shape(name))

    def others(self, k: int, weights: Sequence[float]) -> Mapping[str, Tensor]:
        """Return the mean of all networks but one, which is computed as it is read."""
        left = [0.0 if j == k else w for j, w in enumerate(weights)]
        return Computed(self.names, functools.partial(self.mean, weights=left))

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a tensor."""
        first = self.networks[0]
        return first.shape(name) if isinstance(first, FittedNetwork) else first[name].shape


def _wide(t: Tensor) -> Tensor:
    return t.float() if t.dtype in _HALF else t


# ------------------------------------------------------------ averages
class _Average:
    """Networks with their weights in an average, and the examples for its evaluation.

    Networks without a weight serve as a frame only, and count equally until the end.
    """

    def __init__(
        self,
        module: nn.Module,
        every: Every,
        weights: list[float],
        examples: ExampleBatches | None,
    ) -> None:
        self.module, self.every, self.weights = module, every, weights
        self.balanced = weights if all(weights) else shares(None, len(weights))
        self.examples = examples and examples.fitted(module, every.member(0))
        self.floating = [n for n in every.names if P.of(module)[n].is_floating_point()]
        self.size = sum(every.shape(n).numel() for n in self.floating)

    def describe(self) -> str:
        """Return a description of the networks and their weights."""
        listed = ", ".join(f"{weight:.3g}" for weight in self.weights[:8])
        more = ", ..." if len(self.weights) > 8 else ""
        return f"{len(self.weights)} networks of {self.size} parameters, weighted {listed}{more}"

    def numbers(self) -> dict[str, float]:
        """Return distances and losses of the networks and their average."""
        weights = torch.tensor(self.balanced)
        squares = (
            distance_to_mean({name: piece}, [name], weights)
            for name in shown(self.floating, "reading")
            for piece in self.every.parts(name)
        )
        numbers = {"distance to the average": math.sqrt(sum(squares))}
        if self.examples is not None:
            data = self.examples.batches, loss
            members = (self.every.member(k) for k in range(len(self.weights)))
            losses = [mean_loss(self.module, member, *data) for member in members]
            theirs = sum(w * value for w, value in zip(self.balanced, losses, strict=True))
            mean = {name: self.every.mean(name, self.balanced) for name in self.every.names}
            mean = reestimated(self.module, mean, self.examples.inputs)
            barrier = mean_loss(self.module, mean, *data) - theirs
            numbers[f"barrier (loss of the average above theirs) on {self.examples}"] = barrier
        return numbers

    def align(self, sym: Symmetries, method: str, seed: int) -> None:
        """Bring all networks into one frame."""
        mixing = method == "mixing"
        if not (sym.permutations or sym.signs or (mixing and sym.linear)):
            print("The network has no exchangeable units: it is averaged without matching.")
            return
        if 4 * self.size * len(self.weights) > _LARGE:
            self._match_to_the_first(sym, "mixing" if mixing else "reference", seed)
            if method == "joint" and len(self.weights) > 2:
                self._match_to_the_others(sym, seed)
            return
        options: dict[str, Any] = {"method": "reference" if method == "reference" else "joint"}
        options |= {"signs": not mixing, "mixing": mixing, "seed": seed, "weights": self.balanced}
        whole = join([self.every.member(k) for k in range(len(self.weights))])
        alignment = align(whole, sym, **options)
        print(alignment)
        self.every = Every(list(unstack(alignment.element(whole))))

    def _match_to_the_first(self, sym: Symmetries, frame: Frame, seed: int) -> None:
        """Match large networks in pairs, tensor by tensor."""
        first, *others = self.every.networks
        for k, network in enumerate(shown(others, "matching")):
            self.every.move(k + 1, in_frame(network, first, sym, frame, seed))

    def _match_to_the_others(self, sym: Symmetries, seed: int) -> None:
        """Match each large network but the first to the mean of the others, until all stay."""
        every, names = self.every, plan_of(sym).compared
        for _ in range(_SWEEPS):
            moved = False
            for k, network in list(enumerate(every.networks))[1:]:
                others = every.others(k, self.balanced)
                found = match(network, others, sym, method="ascent", signs=True, seed=seed)
                pairs = ((every.moved[k][n][None], others[n]) for n in names)
                before = sum(float(inner_products(*pair, torch.float32)) for pair in pairs)
                if float(found.objective) > before + _GAIN * abs(before):
                    every.move(k, found.element)
                    moved = True
            if not moved:
                return

    def mean(self) -> Callable[[str], Tensor]:
        """Return the average, with statistics of batch norms re-estimated on the data."""
        for name in (n for n in self.every.names if n not in self.floating):
            tensor = torch.cat([*self.every.parts(name, self.weights)], 1)
            whole = not name.endswith("num_batches_tracked")  # only counts may differ
            if whole and not torch.equal(tensor, tensor[:1].expand_as(tensor)):
                raise ValueError(
                    f"A network has other whole numbers in {name!r} than the first one, "
                    "and they cannot be averaged."
                )
        mean = functools.partial(self.every.mean, weights=self.weights)
        if sum(map(bool, self.weights)) < 2 or not batch_norms(self.module):
            return mean
        if self.examples is None:
            print("the statistics of batch norms are averaged; `--data` re-estimates them")
            return mean
        tensors = {name: mean(name) for name in self.every.names}
        return reestimated(self.module, tensors, self.examples.inputs).__getitem__


def _form(
    out: str | None, files: Iterable[FittedNetwork | None], like: str | None
) -> FittedNetwork | None:
    """Choose the file that provides names, types and other tensors: the first of its kind."""
    checkpoint = not like and out is not None and out.endswith(".ckpt")
    fitting = (f for f in files if f and (f.stored.path.suffix == ".ckpt" or not checkpoint))
    form = next(fitting, None)
    if like and form is None:
        raise ValueError(f"`--like` must be a file or folder with one network, got {like}.")
    return form

"""Small networks of five families, children of them, and attacks that disguise a child."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bnn_research.rivals import Names
from lightning_bnn.datamodules import MNIST
from lightning_bnn.datamodules.base import data_root, missing
from weightsym import (
    Element,
    Symmetries,
    discover,
    fold_networks,
    match,
    permute,
    random_permutations,
)
from weightsym import params as P
from weightsym.params import Params, keyed_generator

Sampler = Callable[[torch.Generator], tuple[Tensor, Tensor]]
"""Draws a batch of inputs and targets."""
_LENGTH, _SIDE = 32, 7  # of texts, and of patches


@dataclass(frozen=True)
class Scale:
    """The number of independent networks, their size, and the length of training."""

    networks: int
    width: int
    hidden: int
    steps: int
    images: int


SCALES = {"small": Scale(8, 32, 64, 200, 6000), "paper": Scale(8, 64, 192, 2000, 50_000)}
FAMILIES = ("Llama", "GPT-2", "ViT", "CNN", "MLP")


# ------------------------------------------------------------ networks
class Layer(nn.Module):
    """Attention and hidden units on a stream: gated, turned and without biases as of a Llama."""

    def __init__(self, width: int, hidden: int, gated: bool, causal: bool) -> None:
        super().__init__()
        self.gated, self.causal, self.heads = gated, causal, 2
        self.before, self.after = (_norm(width, gated) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, not gated) for _ in range(4))
        self.up, self.down = (
            nn.Linear(width, hidden, not gated),
            nn.Linear(hidden, width, not gated),
        )
        if gated:
            self.gate = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        q, k, v = (m(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in
                   (self.q, self.k, self.v))  # fmt: skip
        if self.gated:
            q, k = _turned(q), _turned(k)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if self.causal:
            scores = scores + torch.full((x.shape[1], x.shape[1]), -1e4).triu(1)
        x = x + self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        y = self.after(x)
        units = self.up(y) * F.silu(self.gate(y)) if self.gated else F.gelu(self.up(y))
        return x + self.down(units)


def _norm(width: int, gated: bool) -> nn.Module:
    return nn.RMSNorm(width) if gated else nn.LayerNorm(width)


def _turned(x: Tensor) -> Tensor:
    """Rotary positions."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] * 100.0 ** (-torch.arange(half) / half)
    cos, sin = (torch.cat([f, f], -1) for f in (angles.cos(), angles.sin()))
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Transformer(nn.Module):
    """Two layers on a stream, of tokens or of patches."""

    def __init__(
        self, width: int, hidden: int, *, outputs: int, gated: bool = False, images: bool = False
    ) -> None:
        super().__init__()
        self.images, count = images, 16 if images else _LENGTH
        self.embed = nn.Linear(_SIDE**2, width) if images else nn.Embedding(outputs, width)
        self.positions = None if gated else nn.Parameter(0.1 * torch.randn(count, width))
        self.layers = nn.ModuleList(Layer(width, hidden, gated, not images) for _ in range(2))
        self.last, self.head = _norm(width, gated), nn.Linear(width, outputs, not gated)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(F.unfold(x, _SIDE, stride=_SIDE).mT if self.images else x)
        x = x if self.positions is None else x + self.positions[: x.shape[1]]
        for layer in self.layers:
            x = layer(x)
        x = self.last(x)
        return self.head(x.mean(1) if self.images else x)


def convolutions(width: int, hidden: int) -> nn.Module:
    """Three convolutions with BatchNorm.

    Args:
        width: channels of the first one.
        hidden: channels of the others.
    """
    sizes, layers = (1, width, hidden, hidden), list[nn.Module]()
    for before, after in itertools.pairwise(sizes):
        conv = nn.Conv2d(before, after, 5 if before == 1 else 3, 2, 1, bias=False)
        layers += [conv, nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(hidden, 10))


def perceptron(hidden: int) -> nn.Module:
    """Two hidden layers.

    Args:
        hidden: units of each.
    """
    layers = nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(hidden, 10))


# ------------------------------------------------------------ families
@dataclass(frozen=True, eq=False)
class Family:
    """Networks of one architecture, their data, and other data for a child."""

    name: str
    make: Callable[[], nn.Module]
    names: Names
    data: Sampler
    other: Sampler
    held: tuple[Tensor, Tensor]

    @property
    def example(self) -> Tensor:
        """An input."""
        return self.held[0][:2]

    def accuracy(self, module: nn.Module, params: Params) -> float:
        """The share of right letters or classes, in per cent."""
        inputs, targets = self.held
        with torch.no_grad():
            outputs = torch.func.functional_call(module, params, (inputs,))
        return 100 * float((outputs.argmax(-1) == targets).double().mean())


def family(name: str, settings: Scale) -> Family:
    """Return one of the five families.

    Args:
        name: Llama, GPT-2, ViT, CNN or MLP.
        settings: sizes.
    """
    size = settings.width, settings.hidden
    attention = [f"layers.{k}" for k in range(2)]
    names = Names(attention, [f"{n}.up.weight" for n in attention], "embed.weight", name == "Llama")
    make: Callable[[], nn.Module]
    if name in ("Llama", "GPT-2"):
        letters, count = _text()
        half = len(letters) * 9 // 10
        make = functools.partial(Transformer, *size, outputs=count, gated=name == "Llama")
        data, other = _texts(letters[:half]), _texts(letters[:half].flip(0))
        return Family(name, make, names, data, other, _texts(letters[half:])(_generator("held")))
    source = MNIST(augment=False, val_size=0)
    splits = source.load()
    if name == "ViT":
        make = functools.partial(Transformer, *size, outputs=10, images=True)
    elif name == "MLP":
        names = Names(("2", "4"), ("1.weight", "3.weight"))
        make = functools.partial(perceptron, settings.hidden)
    else:
        names = Names(("2", "5", "8"), [f"{k}.weight" for k in (0, 3, 6)])
        make = functools.partial(convolutions, *size)
    sets = [(source.normalise(x[: settings.images]), y[: settings.images])
            for x, y in (splits.train, splits.ood["fashion"])]  # fmt: skip
    held = source.normalise(splits.test[0][:1000]), splits.test[1][:1000]
    return Family(name, make, names, pictures(*sets[0]), pictures(*sets[1]), held)


def _generator(*key: Any) -> torch.Generator:
    return keyed_generator("lineage", *key)


@functools.cache
def _text() -> tuple[Tensor, int]:
    """All letters as numbers, and how many there are."""
    path = data_root(None) / "text" / "tinyshakespeare.txt"
    if not path.is_file():
        raise missing("text/tinyshakespeare.txt", data_root(None), "Put the text there.")
    text = path.read_text()
    places = {letter: k for k, letter in enumerate(sorted(set(text)))}
    return torch.tensor([places[letter] for letter in text]), len(places)


def _texts(letters: Tensor) -> Sampler:
    def sample(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(letters) - _LENGTH, (32,), generator=generator)
        rows = letters[starts[:, None] + torch.arange(_LENGTH + 1)]
        return rows[:, :-1], rows[:, 1:]

    return sample


def pictures(inputs: Tensor, labels: Tensor) -> Sampler:
    """Draw batches of images.

    Args:
        inputs: all images.
        labels: their classes.
    """

    def sample(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(inputs), (64,), generator=generator)
        return inputs[chosen], labels[chosen]

    return sample


def trained(
    network: nn.Module,
    data: Sampler,
    steps: int,
    generator: torch.Generator,
    teacher: nn.Module | None = None,
    rate: float = 3e-3,
) -> nn.Module:
    """Train a copy, on labels or on what a teacher says.

    Args:
        network: the start.
        data: draws batches.
        steps: how many.
        generator: of the batches.
        teacher: whose outputs are learnt.
        rate: of learning.
    """
    network = copy.deepcopy(network).train()
    optimizer = torch.optim.AdamW(network.parameters(), rate)
    for _ in range(steps):
        inputs, targets = data(generator)
        outputs = network(inputs).flatten(0, -2)
        goal = targets.flatten()
        if teacher is not None:
            with torch.no_grad():
                goal = teacher(inputs).flatten(0, -2).softmax(-1)
        optimizer.zero_grad()
        F.cross_entropy(outputs, goal).backward()
        optimizer.step()
    return network.eval()


# ------------------------------------------------------------ children and attacks
def pruned(w: Tensor, share: float = 0.6) -> Tensor:
    """Set the smallest weights to zero."""
    least = w.abs().flatten().kthvalue(max(1, int(share * w.numel()))).values
    return torch.where(w.abs() > least, w, 0.0)


def rounded(w: Tensor, bits: int) -> Tensor:
    """Round to the nearest of equal steps, with one scale for a tensor."""
    step = w.abs().max() / (2 ** (bits - 1) - 1)
    return (w / step).round() * step if step > 0 else w


def adapted(w: Tensor, tuned: Tensor, rank: int = 4) -> Tensor:
    """Add what a LoRA of some rank can hold of the difference to a matrix that was tuned."""
    if w.ndim < 2:
        return w
    left, sizes, right = torch.linalg.svd((tuned - w).flatten(1), full_matrices=False)
    return w + (left[:, :rank] * sizes[:rank] @ right[:rank]).reshape(w.shape)


def noisy(params: Params, size: float, generator: torch.Generator) -> Params:
    """Add noise in units of the standard deviation of every matrix."""
    return {n: w + size * w.std() * torch.randn(w.shape, generator=generator) if w.ndim > 1 else w
            for n, w in params.items()}  # fmt: skip


def _of_matrices(change: Callable[[Tensor], Tensor], params: Params) -> Params:
    return {name: change(w) if w.ndim > 1 else w for name, w in params.items()}


NOISE = 0.2
"""Of the attack, in standard deviations of each matrix."""
ATTACKS = ("none", "units permuted", "all symmetries", "noise", "noise, symmetries")
LEVELS = (1.0, 2.0)
"""Of noise that costs the attacker more and more."""


@dataclass(frozen=True, eq=False)
class Bases:
    """Independent networks of a family, and their symmetries as stored and with folded gains."""

    family: Family
    networks: Sequence[nn.Module]
    sym: Symmetries
    sym_folded: Symmetries
    steps: int
    seed: int

    @classmethod
    def of(cls, every: Family, settings: Scale, seed: int) -> Bases:
        """Train networks that differ in nothing but their seeds."""
        networks = []
        for k in range(settings.networks):
            with P.keyed_randomness("lineage", every.name, seed, k):
                start = every.make()
            generator = _generator(every.name, seed, k, "batches")
            networks.append(trained(start, every.data, settings.steps, generator))
        sym = discover(networks[0], every.example)
        folded, _ = fold_networks(networks[0], [P.of(networks[0])], every.example)
        sym_folded = discover(folded, every.example)
        return cls(every, networks, sym, sym_folded, settings.steps, seed)

    def fold(self, networks: Sequence[Params]) -> list[Params]:
        """The weights of networks with the gains of their norms folded."""
        return fold_networks(self.networks[0], networks, self.family.example)[1]

    def attacked(self, networks: Sequence[Params], attacks: Sequence[str]) -> list[Params]:
        """Disguise networks, which stay what they are but for noise."""
        generator = _generator(self.family.name, self.seed, "attacks")
        rough = [noisy(w, NOISE, generator) if "noise" in attack else w
                 for w, attack in zip(networks, attacks, strict=True)]  # fmt: skip
        every = zip(rough, self.fold(rough), attacks, strict=True)
        return [self._disguised(w, folded, attack, generator) for w, folded, attack in every]

    def _disguised(
        self, w: Params, folded: Params, attack: str, generator: torch.Generator
    ) -> Params:
        if attack == "units permuted":
            return permute(w, self.sym, random_permutations(self.sym, generator))
        if "symmetries" not in attack:
            return w
        turned = Element.random(self.sym_folded, generator)(folded)
        plain = {n: torch.ones_like(t) if n.endswith("weight") else torch.zeros_like(t)
                 for n, t in w.items()}  # fmt: skip
        without_gains = {n: turned.get(n, plain[n]) for n in w}
        return Element.random(self.sym, generator)(without_gains)  # which gives other gains

    def children(self) -> dict[str, Params]:
        """Networks made from the first one."""
        (parent, other, *_), every = self.networks, self.family
        half, g = max(1, self.steps // 2), functools.partial(_generator, every.name, self.seed)
        a, b = P.of(parent), P.of(other)
        b = match(b, a, self.sym, method="ascent", signs=True).element(b)
        tuned = P.of(trained(parent, every.other, half, g("tuned")))
        return {
            "tuned on other data": tuned,
            "LoRA of rank 4": {name: adapted(w, tuned[name]) for name, w in a.items()},
            "trained on": P.of(trained(parent, every.data, half, g("more"))),
            "pruned, 60 %": _of_matrices(pruned, a),
            "int8": _of_matrices(functools.partial(rounded, bits=8), a),
            "int4": _of_matrices(functools.partial(rounded, bits=4), a),
            "merged": {name: (w + b[name]) / 2 for name, w in a.items()},
        }

    def distilled(self) -> Params:
        """A network from another start that learnt what the first one says."""
        generator = _generator(self.family.name, self.seed, "distilled")
        with P.keyed_randomness("lineage", self.family.name, self.seed, "student"):
            start = self.family.make()
        teacher = self.networks[0]
        return P.of(trained(start, self.family.data, self.steps, generator, teacher))

    def breaking(self) -> Iterator[tuple[str, Params]]:
        """Networks made from the first one, at a price."""
        for size in LEVELS:
            noise = _generator(self.family.name, self.seed, "noise", str(size))
            yield f"noise, {size:g} sd", noisy(P.of(self.networks[0]), size, noise)
        hot = _generator(self.family.name, self.seed, "hot")
        again = trained(self.networks[0], self.family.data, self.steps, hot, rate=0.03)
        yield "trained on, tenfold rate", P.of(again)

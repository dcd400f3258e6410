"""Tests of lineage on attacked children of small networks, ours beside published ones."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from scipy.stats import kstest
from torch import Tensor, nn
from torch.nn import functional as F

from bnn_research.rivals import RIVALS, Names, Suspect
from bnn_research.scales import settings_of
from lightning_bnn.datamodules import MNIST
from lightning_bnn.datamodules.base import data_root, missing
from lightning_bnn.findings import Findings, publish, results_folder
from lightning_bnn.plots import Line, lines_figure
from lightning_bnn.tables import Cell, Table
from weightsym import (
    Element,
    Relation,
    Symmetries,
    discover,
    fold_networks,
    kinship,
    likeness,
    match,
    permute,
    random_permutations,
    relation,
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


SCALES = {"small": Scale(3, 64, 128, 200, 6000), "paper": Scale(8, 64, 192, 2000, 50_000)}
FAMILIES = ("Llama", "GPT-2", "ViT", "CNN")


def lineage(
    scale: Literal["small", "paper"] = "small",
    families: list[str] | None = None,
    networks: int | None = None,
    width: int | None = None,
    hidden: int | None = None,
    steps: int | None = None,
    images: int | None = None,
    seed: int = 0,
    out: str = "studies/lineage",
) -> None:
    """Train four families of small networks, make children, attack them, and ask who is found.

    Languages are of tinyshakespeare, letter by letter (text/tinyshakespeare.txt in the folder of
    the data), images of MNIST. Negatives are networks of other seeds, of the same data and recipe,
    and one distilled from the parent.

    Args:
        scale: small, which takes about ten minutes, or paper, with more and larger networks.
        families: some of Llama, GPT-2, ViT, CNN; by default all.
        networks: number of independent networks of each family.
        width: of the streams; the CNN has as many channels at most.
        hidden: number of hidden units of a layer.
        steps: number of training steps.
        images: number of training images.
        seed: random seed of the starts, the batches and the attacks.
        out: folder for the results.
    """
    chosen = list(families or FAMILIES)
    if unknown := sorted({*chosen} - {*FAMILIES}):
        raise ValueError(f"`families` must be some of {', '.join(FAMILIES)}, got {unknown[0]!r}.")
    folder = results_folder(out, "lineage")
    settings = settings_of(
        SCALES, scale, networks=networks, width=width, hidden=hidden, steps=steps, images=images
    )
    if settings.networks < 2:
        raise ValueError(f"`networks` must be at least 2, got {settings.networks}.")
    start = time.process_time()
    trials = {name: Trial.of(name, settings, seed) for name in chosen}
    minutes = (time.process_time() - start) / 60
    publish(_findings(trials, settings, minutes), folder)


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
    """Return one of the four families.

    Args:
        name: Llama, GPT-2, ViT or CNN.
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
        return {
            "tuned on other data": P.of(trained(parent, every.other, half, g("tuned"))),
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


# ------------------------------------------------------------ comparisons
@dataclass(frozen=True, eq=False)
class Compared:
    """A suspect beside a network that may be its parent.

    Attributes:
        child: how it was made, empty for another seed.
        attack: what was done to it then.
        related: whether it was made from the other one.
        found: what our tests say.
        accuracy: of the suspect, in per cent.
        scores: of all methods; the higher, the more in common.
        seconds: of all methods.
    """

    child: str
    attack: str
    related: bool
    found: Relation
    accuracy: float
    scores: Mapping[str, float]
    seconds: Mapping[str, float]

    @property
    def share(self) -> float:
        """The share of units that are found twice."""
        return share_of(self.found)


def share_of(found: Relation) -> float:
    """Return the share of units that are found twice, among all that can be."""
    judged = [group for group in found.groups if group.agreeing is not None]
    units = sum(group.units for group in judged)
    return sum(group.agreeing or 0 for group in judged) / units if units else math.nan


def log10(p: float) -> float:
    """Return the exponent of a probability, of 1e-300 at least."""
    return math.log10(max(p, 1e-300))


@dataclass(frozen=True, eq=False)
class Suspected:
    """A network that is asked about: how it was made, its attack, and who may be its parent."""

    child: str
    attack: str
    base: int
    related: bool
    params: Params


@dataclass(frozen=True, eq=False)
class Trial:
    """All comparisons of a family."""

    bases: Bases
    compared: Sequence[Compared]
    breaking: Sequence[Compared]

    @classmethod
    def of(cls, name: str, settings: Scale, seed: int) -> Trial:
        """Train, make children, attack and compare."""
        bases = Bases.of(family(name, settings), settings, seed)
        children = itertools.product(bases.children().items(), ATTACKS)
        every = [Suspected(child, attack, 0, True, w) for (child, w), attack in children]
        pairs = itertools.combinations(range(settings.networks), 2)
        for (j, k), attack in zip(pairs, itertools.cycle(ATTACKS), strict=False):
            every.append(Suspected("", attack, j, False, P.of(bases.networks[k])))
        taught = bases.distilled()
        every += [Suspected("distilled", attack, 0, False, taught) for attack in ATTACKS[::4]]
        every += [Suspected(how, "at a price", 0, True, w) for how, w in bases.breaking()]
        compared = _Judge(bases).compare(every)
        breaking = [c for c in compared if c.attack == "at a price"]
        return cls(bases, [c for c in compared if c not in breaking], breaking)


class _Judge:
    """Compares suspects with bases by all methods, and takes the time."""

    def __init__(self, bases: Bases) -> None:
        self.bases, self.inputs = bases, bases.family.held[0][:64]
        stored = [P.of(net) for net in bases.networks]
        self.folded = bases.fold(stored)
        self.shelf = [likeness(w, bases.sym_folded) for w in self.folded]
        self.seen = [self._seen(w) for w in stored]

    def compare(self, every: Sequence[Suspected]) -> list[Compared]:
        """Attack all suspects, fold their gains, and compare each with its base."""
        stored = self.bases.attacked([s.params for s in every], [s.attack for s in every])
        stored = [{n: t.detach() for n, t in w.items()} for w in stored]
        folded = self.bases.fold(stored)
        return [self._compare(*each) for each in zip(every, stored, folded, strict=True)]

    def _seen(self, params: Params) -> Suspect:
        module, names = self.bases.networks[0], self.bases.family.names
        return Suspect.of(module, params, names, self.inputs)

    def _compare(self, suspect: Suspected, stored: Params, folded: Params) -> Compared:
        scores, seconds = dict[str, float](), dict[str, float]()

        def timed(name: str, function: Callable[[], Any]) -> Any:
            start = time.process_time()
            result = function()
            seconds[name] = time.process_time() - start
            return result

        base, sym = suspect.base, self.bases.sym_folded
        found: Relation = timed("ours", lambda: relation(folded, self.folded[base], sym))
        scores["units found twice"] = share_of(found)
        scores["units in place"] = -log10(found.p_exact)
        scores["sketch"] = timed("sketch", lambda: self._sketch(folded, base))
        seen = timed("forward", lambda: self._seen(stored))
        for name, score in RIVALS.items():
            scores[name] = timed(name, functools.partial(score, seen, self.seen[base]))
        accuracy = self.bases.family.accuracy(self.bases.networks[0], stored)
        return Compared(
            suspect.child, suspect.attack, suspect.related, found, accuracy, scores, seconds
        )

    def _sketch(self, folded: Params, base: int) -> float:
        """Correlate the sketches beyond what all networks have in common."""
        return float(kinship([likeness(folded, self.bases.sym_folded), *self.shelf])[0, base + 1])


# ------------------------------------------------------------ tables
def _findings(trials: Mapping[str, Trial], settings: Scale, minutes: float) -> Findings:
    tables = {
        "auc": _cells(trials, "Area under the ROC curve", auc),
        "found": _cells(
            trials, "Children found at 1 % false ones (above all negatives), %", true_positives
        ),
        "children": _children(trials),
        "nulls": _nulls(trials),
        "breaks": _breaks(trials),
        "seconds": _seconds(trials),
    }
    cautions = [
        "Negatives of each cell are all pairs of independent networks of the family, attacked in "
        "turns, and the distilled network, so that the rate of false ones is 0 of as many.",
        f"{minutes:.1f} CPU minutes.",
    ]
    title = "Lineage: children, attacks, and who finds them"
    figures = {"noise": _figure(trials)}
    return Findings("lineage", title, tables, figures, cautions, {"scale": settings.__dict__})


def auc(positives: Sequence[float], negatives: Sequence[float]) -> float:
    """Return the share of pairs of scores in the right order, NaN if one is undefined.

    Args:
        positives: of related networks.
        negatives: of independent ones.
    """
    above = np.subtract.outer(positives, negatives)
    return math.nan if np.isnan(above).any() else float(((above > 0) + 0.5 * (above == 0)).mean())


def true_positives(positives: Sequence[float], negatives: Sequence[float]) -> float:
    """Return the percentage of positives above all but 1 % of the negatives.

    Args:
        positives: scores of related networks.
        negatives: of independent ones.
    """
    limit = np.quantile(negatives, 0.99, method="higher")
    return math.nan if np.isnan(limit) else 100 * float((np.array(positives) > limit).mean())


def _cells(
    trials: Mapping[str, Trial],
    title: str,
    judged: Callable[[Sequence[float], Sequence[float]], float],
) -> Table:
    """A row for every family and attack, a column for every method."""
    rows: list[Mapping[str, Cell]] = []
    for (name, trial), attack in itertools.product(trials.items(), ATTACKS):
        negatives = [c.scores for c in trial.compared if not c.related]
        positives = [c.scores for c in trial.compared if c.related and c.attack == attack]
        methods = {
            m: judged([s[m] for s in positives], [s[m] for s in negatives]) for m in positives[0]
        }
        rows.append({"family": name, "attack": attack, **methods})
    return Table.of(title, rows, 2 if judged is auc else 0)


def _children(trials: Mapping[str, Trial]) -> Table:
    """Tabulate the results of our tests for every child, as it is and after all attacks."""
    rows: list[Mapping[str, Cell]] = []
    for name, trial in trials.items():
        by_child: dict[str, dict[str, Compared]] = {}
        for each in (c for c in trial.compared if c.child):
            by_child.setdefault(each.child, {})[each.attack] = each
        for child, c in by_child.items():
            plain, attacked = c[ATTACKS[0]], c[ATTACKS[-1]]
            rows.append({
                "family": name, "child": child, "accuracy, %": plain.accuracy,
                "in place": log10(plain.found.p_exact), "twice": log10(plain.found.p_robust),
                "left": plain.found.difference.rest,
                "attacked: accuracy, %": attacked.accuracy,
                "attacked: in place": log10(attacked.found.p_exact),
                "attacked: twice": log10(attacked.found.p_robust),
                "attacked: left": attacked.found.difference.rest,
                "verdict": attacked.found.verdict,
            })  # fmt: skip
    digits = {name: 1 for name in rows[0]} | {"left": 3, "attacked: left": 3}
    title = "Log10 p of units in their places and of units found twice, and what is left"
    return Table.of(title, rows, digits)


def _nulls(trials: Mapping[str, Trial]) -> Table:
    """Tabulate what independent networks have in common."""
    rows: list[Mapping[str, Cell]] = []
    for name, trial in trials.items():
        pairs = [c for c in trial.compared if not c.related]
        seeds = [c.found for c in pairs if not c.child]
        groups = [g for c in pairs for g in c.found.groups if g.agreeing is not None]
        shares = [(g.agreeing or 0) / g.units for g in groups]
        values = [u for k, found in enumerate(seeds) for u in _uniform(found, _generator(name, k))]
        rows.append({
            "family": name, "pairs": len(pairs), "called independent": sum(
                c.found.verdict == "independent" for c in pairs),
            "mean share found twice": float(np.mean(shares)),
            "largest share of a group": max(shares),
            "largest share of a pair": max(c.share for c in pairs),
            "groups in place": len(values), "KS p": float(kstest(values, "uniform").pvalue),
        })  # fmt: skip
    return Table.of("Independent and distilled networks", rows)


def _uniform(found: Relation, generator: torch.Generator) -> Iterator[float]:
    """By group the probability of as many units in place, made continuous by a random share."""
    counts = [(g.units, g.in_place) for g in found.groups if g.in_place is not None]
    for units, fixed in counts:
        law = [_fixed(k, units) for k in range(min(units, 30) + 1)]
        share = float(torch.rand((), generator=generator))
        yield sum(law[fixed + 1 :]) + share * law[fixed]


def _fixed(k: int, units: int) -> float:
    """The probability of exactly k fixed points of a uniform permutation."""
    left = min(units - k, 30)
    return sum((-1) ** j / math.factorial(j) for j in range(left + 1)) / math.factorial(k)


def _breaks(trials: Mapping[str, Trial]) -> Table:
    """Tabulate attacks at a price, and distillation."""
    rows: list[Mapping[str, Cell]] = [
        {
            "family": name, "attack": c.child, "accuracy before, %": _before(trial),
            "accuracy after, %": c.accuracy, "found twice, %": 100 * c.share,
            "in place": log10(c.found.p_exact), "twice": log10(c.found.p_robust),
            "verdict": c.found.verdict,
        }
        for name, trial in trials.items()
        for c in (*trial.breaking, *(d for d in trial.compared if d.child == "distilled"))
        if c.attack in ("none", "at a price")
    ]  # fmt: skip
    return Table.of("Attacks at a price: accuracy, and results of our tests", rows, 1)


def _before(trial: Trial) -> float:
    bases = trial.bases
    return bases.family.accuracy(bases.networks[0], P.of(bases.networks[0]))


def _seconds(trials: Mapping[str, Trial]) -> Table:
    """CPU seconds of a pair."""
    rows: list[Mapping[str, Cell]] = []
    for name, trial in trials.items():
        for kind, related in (("child", True), ("independent", False)):
            taken = [c.seconds for c in trial.compared if c.related == related]
            means = {m: float(np.mean([s[m] for s in taken])) for m in taken[0]}
            rows.append({"family": name, "pair": kind, **means})
    return Table.of("CPU seconds of a pair", rows)


def _figure(trials: Mapping[str, Trial]) -> Any:
    """The share of units found twice and the accuracy, by the size of the noise."""
    panels = {}
    for name, trial in trials.items():
        noises = trial.breaking[: len(LEVELS)]
        sizes = torch.tensor([0.0, *LEVELS])
        found = torch.tensor([100.0, *(100 * c.share for c in noises)])
        right = torch.tensor([_before(trial), *(c.accuracy for c in noises)])
        panels[name] = {"units found twice": Line(sizes, found), "accuracy": Line(sizes, right)}
    return lines_figure(panels, ("noise, in standard deviations of the weights", "%"))

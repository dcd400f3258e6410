"""What fine-tuning has learnt, moved to a base of another seed: vision transformers on images."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torchvision.transforms.functional import rotate

from bnn_research.families import Transformer, pictures, trained
from bnn_research.scales import settings_of
from lightning_bnn.datamodules import MNIST
from lightning_bnn.findings import Findings, publish, results_folder
from lightning_bnn.tables import Cell, Table, spread
from weightsym import Element, Outcome, discover, fold_networks, learn_match, match, match_all
from weightsym import params as P
from weightsym.params import Params, keyed_generator

Images = tuple[Tensor, Tensor]
_SCALES = (0.25, 0.5, 0.75, 1.0)
"""Factors of a change, of which the best on validation images is taken."""
_HELD, _BATCH = 1000, 64


@dataclass(frozen=True)
class Scale:
    """The number of seeds, and the lengths of training."""

    seeds: int
    width: int
    hidden: int
    steps: int
    tuning: int
    images: int


SCALES = {"small": Scale(5, 32, 64, 400, 200, 6000), "paper": Scale(5, 64, 128, 4000, 1000, 50_000)}


def rebase(
    scale: Literal["small", "paper"] = "small",
    seeds: int | None = None,
    width: int | None = None,
    hidden: int | None = None,
    steps: int | None = None,
    tuning: int | None = None,
    images: int | None = None,
    out: str = "studies/rebase",
) -> Outcome:
    """Move what a vision transformer has learnt by fine-tuning to one of another seed.

    Two bases learn MNIST. One of them is tuned on digits that are turned, and on Fashion;
    what this changes is added to the other base: as it is, or moved along with the match of the
    bases. Norms are folded.

    Args:
        scale: small, which takes minutes, or paper.
        seeds: number of pairs of bases.
        width: of the stream.
        hidden: number of hidden units of a layer.
        steps: number of training steps of a base.
        tuning: number of steps on another task.
        images: number of training images of a task.
        out: folder for the results.
    """
    folder = results_folder(out, "rebase")
    settings = settings_of(
        SCALES, scale, seeds=seeds, width=width, hidden=hidden, steps=steps, tuning=tuning,
        images=images,
    )  # fmt: skip
    start = time.process_time()
    tasks = _tasks(settings)
    found = [_trial(settings, tasks, seed) for seed in range(settings.seeds)]
    tables = {"accuracy": _table(found)}
    cautions = [f"{(time.process_time() - start) / 60:.1f} CPU minutes."]
    title = "Fine-tuning moved to a base of another seed"
    return publish(
        Findings("rebase", title, tables, {}, cautions, {"scale": settings.__dict__}), folder
    )


# ------------------------------------------------------------ tasks
@dataclass(frozen=True)
class Task:
    """Images to learn from, to choose by, and to be judged by."""

    train: Images
    validation: Images
    test: Images

    @classmethod
    def of(cls, x: Tensor, y: Tensor, images: int) -> Task:
        """Split images."""
        ends = images, images + _HELD, images + 2 * _HELD
        return cls(*((x[a:b], y[a:b]) for a, b in zip((0, *ends), ends, strict=False)))


def _tasks(settings: Scale) -> dict[str, Task]:
    source = MNIST(augment=False, val_size=0)
    splits = source.load()
    digits, fashion = ((source.normalise(x), y) for x, y in (splits.train, splits.ood["fashion"]))
    most = settings.images + 2 * _HELD
    count = min(settings.images, len(fashion[0]) - 2 * _HELD)
    return {
        "digits": Task.of(*digits, settings.images),
        **{
            f"digits, {angle} degrees": Task.of(
                rotate(digits[0][:most], angle), digits[1], settings.images
            )
            for angle in (45, 90)
        },
        "Fashion": Task.of(*fashion, count),
    }


def accuracy(module: nn.Module, params: Params, images: Images) -> float:
    """Return the share of right classes, in per cent.

    Args:
        module: gives the computation.
        params: its weights.
        images: with their classes.
    """
    with torch.no_grad():
        outputs = torch.func.functional_call(module, params, (images[0],))
    return 100 * float((outputs.argmax(-1) == images[1]).double().mean())


# ------------------------------------------------------------ one pair of bases
def _trial(settings: Scale, tasks: Mapping[str, Task], seed: int) -> dict[str, dict[str, float]]:
    """Accuracies by task and by what is done."""
    generator = functools.partial(keyed_generator, "rebase", seed)
    make = functools.partial(Transformer, settings.width, settings.hidden, outputs=10, images=True)
    digits, others = tasks["digits"], {n: t for n, t in tasks.items() if n != "digits"}
    bases = list[nn.Module]()
    for k in range(2):
        torch.manual_seed(2 * seed + k)
        bases.append(trained(make(), pictures(*digits.train), settings.steps, generator(k)))
    learn = functools.partial(trained, steps=settings.tuning, rate=1e-3)
    tuned = {
        (name, k): learn(base, pictures(*task.train), generator=generator(name, k))
        for name, task in others.items()
        for k, base in enumerate(bases)
    }
    networks = [P.of(net) for net in (*bases, *tuned.values())]
    module, folded = fold_networks(bases[0], networks, digits.train[0][:2])
    old, new, *after = folded
    elements = frames(module, old, new, digits)
    found = {}
    for name, task in others.items():
        changed = dict(zip(tuned, after, strict=True))
        ways = {
            way: best_scale(module, new, element(changed[name, 0]), element(old), task)
            for way, element in elements.items()
        }
        found[name] = {
            "nothing": accuracy(module, new, task.test),
            **ways,
            "tuned anew": accuracy(module, changed[name, 1], task.test),
        }
    return found


def frames(module: nn.Module, old: Params, new: Params, digits: Task) -> dict[str, Element]:
    """Match the old base to the new one in several ways.

    Args:
        module: gives the computation.
        old: base that was tuned.
        new: base to which the change is added.
        digits: on which both were trained.
    """
    sym, (x, y) = discover(module, digits.train[0][:2]), digits.train
    batches = list(zip(x[:1024].split(_BATCH), y[:1024].split(_BATCH), strict=True))
    by_data = match_all(
        old, new, sym, model=module, batches=[x for x, _ in batches[:8]], by="activations"
    )
    return {
        "added as it is": Element(sym),
        "permuted": match(old, new, sym, signs=True).element,
        "moved, by weights": match_all(old, new, sym).element,
        "moved, by activations": by_data.element,
        "moved, learnt": learn_match(by_data, old, new, sym, module, batches).element,
    }


def best_scale(module: nn.Module, new: Params, tuned: Params, old: Params, task: Task) -> float:
    """Add a change with the factor that is best on validation images, and judge by others.

    Args:
        module: gives the computation.
        new: base to which it is added.
        tuned: the tuned network, in the frame of that base.
        old: the base that it was tuned from, in that frame.
        task: images of what was learnt.
    """
    sums = [{n: w + s * (tuned[n] - old[n]) for n, w in new.items()} for s in _SCALES]
    best = max(sums, key=lambda params: accuracy(module, params, task.validation))
    return accuracy(module, best, task.test)


def _table(found: list[dict[str, dict[str, float]]]) -> Table:
    rows: list[Mapping[str, Cell]] = [
        {"task": task, **{
            way: spread(torch.tensor([trial[task][way] for trial in found])) for way in ways}}
        for task, ways in found[0].items()
    ]  # fmt: skip
    title = "Accuracy on test images of the task, in per cent (mean and deviation over seeds)"
    return Table.of(title, rows, 1)

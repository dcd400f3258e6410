"""P1, figure 4: Kendall's tau between the orders of the units before and after every step."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor

from bnn_research.populations import Recipe, study_job
from bnn_research.scales import settings_of
from lightning_bnn.commands.runs import reseeded, run_jobs
from lightning_bnn.findings import Findings, publish, results_folder
from lightning_bnn.plots import Line, lines_figure
from lightning_bnn.tables import Cell, Table
from weightsym import Outcome, UnitOrders, discover, order_change
from weightsym.files import load

RECIPES = {
    "small": Recipe("digits_drops", "digits (a substitute for CIFAR-100)", 10),
    "paper": Recipe("mnist_p1_ensemble", "MNIST", 10),
    "paper-resnet": Recipe("cifar100_p1_ensemble", "CIFAR-100", 5),
}
_SMOOTHED = 200


def permutations(
    scale: Literal["small", "paper", "paper-resnet"] = "small",
    members: int | None = None,
    epochs: int | None = None,
    by: Literal["max", "first", "mean", "median", "norm", "outgoing"] = "max",
    seed: int = 0,
    out: str = "studies/permutations",
) -> Outcome:
    """Follow the order of the units through several runs, step by step.

    Tau is averaged over layers. A line is the mean over runs, and the band covers all runs. While
    the learning rate is high, units keep changing places; at the end none does. Dashed lines mark
    drops of the rate.

    Args:
        scale: small, paper (OptuNet on MNIST) or paper-resnet (ResNet-18 on CIFAR-100).
        members: number of runs side by side.
        epochs: number of training epochs.
        by: sorting key of the units.
        seed: random seed of the initial weights; other seeds repeat the study on the same data.
        out: folder for the results.
    """
    folder = results_folder(out, "permutations")
    recipe = settings_of(RECIPES, scale, members=members, epochs=epochs)
    file = folder / f"history_{by}.pt"
    overrides = recipe.overrides()
    job = study_job(f"runs_{by}", recipe.preset, overrides, [_History(file, by)])
    job = reseeded(job, seed)
    run_jobs([job], folder)
    note = f"{recipe.members} networks on {recipe.data}: {job.command}"
    return publish(_findings(load(file), note, job.command), folder)


def _findings(history: Mapping[str, Any], note: str, command: str) -> Findings:
    tau, rates, layers = history["tau"], history["rates"], history["layers"]
    names = [
        name if layers.count(name) == 1 else f"{name}, group {k + 1}"
        for k, name in enumerate(layers)
    ]
    curves: dict[str, Tensor] = {"all layers": tau.mean(1)}
    curves |= dict(zip(names, tau.unbind(1), strict=True))
    drops = [k + 1 for k in range(1, len(rates)) if rates[k] < rates[k - 1]]
    phases = itertools.pairwise([0, *drops, len(tau)])
    rows: list[list[Cell]] = []
    for (first, last), (name, values) in itertools.product(phases, curves.items()):
        phase = values[first:last]
        still = 100 * float((phase == 1).all(-1).double().mean())
        numbers = [rates[first], float(phase.mean()), float(phase.min()), still]
        rows.append([f"{first} to {last}", name, *numbers])
    header = ["steps", "layer", "learning rate", "tau, mean", "tau, least"]
    table = Table(
        "Kendall's tau between successive orders", [*header, "steps without change %"], rows, 4
    )
    lines = {title: {"mean of the runs": _smooth(values)} for title, values in curves.items()}
    axes = ("step (dashed: lower learning rate)", "Kendall's tau; band: all runs")
    return Findings(
        "permutations",
        f"Units that change places during training, {tau.shape[2]} runs (P1, figure 4)",
        {"tau": table},
        {"tau": lines_figure(lines, axes, drops)},
        [note],
        {"command": command},
    )


def _smooth(values: Tensor) -> Line:
    """Average a few steps each, for a readable line."""
    size = min(_SMOOTHED, max(1, len(values) // 100))
    count = len(values) // size
    steps = torch.arange(1, count * size + 1).double()
    blocks = values[: count * size].unflatten(0, (count, size)).mean(1)
    x = steps.unflatten(0, (count, size)).mean(1)
    return Line(x, blocks.mean(1), blocks.amin(1), blocks.amax(1))


class _History(L.Callback):
    """Tau of every step, layer and member, and the learning rate."""

    def __init__(self, path: Path, by: Any) -> None:
        self.path, self.by = path, by
        self._history: dict[str, list[Any]] = {"tau": [], "rates": [], "layers": []}
        self._orders: UnitOrders | None = None
        self._last: Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        return {name: list(values) for name, values in self._history.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._history = {name: list(values) for name, values in state_dict.items()}

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._orders is None:
            inputs, _ = pl_module.inputs_and_targets(batch)
            sym = discover(pl_module.template, *(x[:2] for x in inputs))
            self._orders = UnitOrders(sym, self.by)
            self._last = self._orders(pl_module.member_stack())
            self._history["layers"] = list(self._orders.names)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._orders is not None
        assert self._last is not None
        orders = self._orders(pl_module.member_stack())
        tau = order_change(self._last, orders, self._orders.sizes).tau
        self._history["tau"].append(tau.T.cpu())
        self._history["rates"].append(trainer.optimizers[0].param_groups[0]["lr"])
        self._last = orders

    def on_fit_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        torch.save({**self._history, "tau": torch.stack(self._history["tau"])}, self.path)

"""P1, figure 4: Kendall's tau between the orders of the units before and after every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor

from lightning_bnn.comparison.tables import Cell, Table
from lightning_bnn.loading import load
from lightning_bnn.plots import Line, lines_figure
from lightning_bnn.studies.findings import Findings, publish, results_folder, settings_of
from lightning_bnn.studies.populations import Recipe
from lightning_bnn.studies.runs import Job, run_jobs
from lightning_bnn.symmetry import UnitOrders, discover, order_change

__all__ = ["permutations"]

SCALES = {
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
    out: str = "studies/permutations",
) -> None:
    """Follow the order of the units through several runs, step by step.

    Tau is averaged over layers; a line is the mean over runs, the band goes from the lowest to the
    highest run. While the learning rate is high units change places all the time, at the end none
    does. Dashed lines mark drops of the rate.

    Args:
        scale: small, paper (OptuNet on MNIST) or paper-resnet (ResNet-18 on CIFAR-100).
        members: runs side by side.
        epochs: of training.
        by: what units are sorted by.
        out: folder of the results.
    """
    folder = results_folder(out, "permutations")
    recipe = settings_of(SCALES, scale, members=members, epochs=epochs)
    overrides: dict[str, Any] = {"model.init_args.members": recipe.members}
    if recipe.epochs is not None:
        overrides["trainer.max_epochs"] = recipe.epochs
    history = _History(folder / f"history_{by}.pt", by)
    job = Job(f"runs_{by}", recipe.preset, overrides, [history])
    run_jobs([job], folder)
    held = load(folder / f"history_{by}.pt")
    publish(_findings(held, recipe, job.command), folder)


def _findings(held: dict[str, Any], recipe: Recipe, command: str) -> Findings:
    tau: Tensor = held["tau"]
    names = [
        name if held["layers"].count(name) == 1 else f"{name}, group {k + 1}"
        for k, name in enumerate(held["layers"])
    ]
    layers: dict[str, Tensor] = dict(zip(names, tau.unbind(1), strict=True))
    steps = torch.arange(1, len(tau) + 1)
    drops = [k + 1 for k in range(1, len(held["rates"])) if held["rates"][k] < held["rates"][k - 1]]
    phases = [0, *drops, len(tau)]
    rows: list[list[Cell]] = []
    for first, last in zip(phases, phases[1:], strict=False):
        part = {"all layers": tau.mean(1), **layers}
        for name, values in part.items():
            own = values[first:last]
            still = float((own == 1).all(-1).double().mean())
            rows.append(
                [f"{first} to {last}", name, held["rates"][first], float(own.mean()),
                 float(own.min()), 100 * still]
            )  # fmt: skip
    header = [
        "steps",
        "layer",
        "learning rate",
        "tau, mean",
        "tau, least",
        "steps without change %",
    ]
    return Findings(
        "permutations",
        f"Units that change places during training, {tau.shape[2]} runs (P1, figure 4)",
        {"tau": Table("Kendall's tau between successive orders", header, rows, 4)},
        {
            "tau": lines_figure(
                {
                    title: {"mean of the runs": _smooth(steps, values)}
                    for title, values in {"all layers": tau.mean(1), **layers}.items()
                },
                ("step (dashed: lower learning rate)", "Kendall's tau; band: all runs"),
                drops,
            )
        },
        [f"{recipe.members} networks on {recipe.data}: {command}"],
        {"command": command},
    )


def _smooth(steps: Tensor, values: Tensor) -> Line:
    """Means over a few steps each, so that a line is readable."""
    size = min(_SMOOTHED, max(1, len(steps) // 100))
    count = len(steps) // size
    blocks = values[: count * size].unflatten(0, (count, size)).mean(1)
    x = steps[: count * size].unflatten(0, (count, size)).double().mean(1)
    return Line(x, blocks.mean(1), blocks.amin(1), blocks.amax(1))


class _History(L.Callback):
    """Tau of every step, layer and member, and the learning rate."""

    def __init__(self, path: Path, by: Any) -> None:
        self.path, self.by = path, by
        self._held: dict[str, list[Any]] = {"tau": [], "rates": [], "layers": []}
        self._orders: UnitOrders | None = None
        self._last: Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on with."""
        return {name: list(values) for name, values in self._held.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on."""
        self._held = {name: list(values) for name, values in state_dict.items()}

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """The first orders."""
        if self._orders is None:
            inputs, _ = pl_module.inputs_and_targets(batch)
            found = discover(pl_module.template, *(x[:2] for x in inputs))
            self._orders = UnitOrders(found, self.by)
            self._last = self._orders(pl_module.member_stack())
            self._held["layers"] = list(self._orders.names)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Compare."""
        assert self._orders is not None
        assert self._last is not None
        now = self._orders(pl_module.member_stack())
        tau = order_change(self._last, now, self._orders.sizes).tau
        self._held["tau"].append(tau.T.cpu())
        self._held["rates"].append(trainer.optimizers[0].param_groups[0]["lr"])
        self._last = now

    def on_fit_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Keep it beside the run."""
        torch.save({**self._held, "tau": torch.stack(self._held["tau"])}, self.path)

"""Pictures of a posterior during training: weights as they are, and without symmetries."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_bnn._compat import figure_step
from lightning_bnn.callbacks.figure_logging import log_folder, log_layout, log_panels
from lightning_bnn.callbacks.mass_gap import MassGap
from lightning_bnn.callbacks.orbit_drift import OrbitDrift
from lightning_bnn.callbacks.permutation_tau import PermutationTau
from lightning_bnn.callbacks.watching import Network, SymmetryCallback
from weightsym import canonicalise
from weightsym.params import Params, check_count

__all__ = ["PosteriorFigures"]

_FORMS = ("raw", "scaled", "sorted")
_LAYERS, _SAMPLES, _POINTS = 6, 10_000, 4000
_LAYOUT = {
    "symmetry": {
        title: ["Multiline", [rf"(.+/)?{tags}$"]]  # behind the name of a network
        for title, tags in {
            "tau": "tau(/.+)?",
            "mass": "mass(_minimum)?",
            "excess mass, %": "mass_excess(/.+)?",
            "largest weight": "largest_weight(_at_minimum)?",
        }.items()
    }
}


class PosteriorFigures(SymmetryCallback):
    """Draws the weights during training: raw, with unit norms, and sorted.

    - ``posterior/trajectories/<form>``: some weights over time,
    - ``posterior/pair/<form>``: two weights against each other over time (and over the networks of
      a module that trains several), as a density,
    - ``posterior/marginals/<layer>``: the distribution of the weights of each layer, now,
    - ``posterior/tau``, ``posterior/mass`` and ``posterior/drift``: the curves of `PermutationTau`,
      `MassGap` and `OrbitDrift`, if they run too, and ``posterior/largest``, the largest weight of
      every layer.

    Forms are ``raw``, ``scaled`` and ``sorted``. Figures go to every logger that accepts them
    (TensorBoard, Weights & Biases, MLflow, Comet), one panel at a time, or else to PNG files in the
    log folder, with all forms or layers side by side. TensorBoard keeps ten pictures per tag by
    default: ``tensorboard --samples_per_plugin images=200`` shows more.

    Args:
        every_n_steps: number of steps between two looks at the weights.
        draw_every: number of looks between two figures; the last one is drawn at the end.
        weights: number of weights to follow.
        module: name of the network inside the LightningModule; by default it is found.

    >>> import os, tempfile
    >>> from lightning import Trainer
    >>> from lightning_bnn.datamodules import TwoGaussians
    >>> from lightning_bnn.models import mlp
    >>> from lightning_bnn.modules import DeepEnsemble
    >>> quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    >>> quiet |= {"enable_model_summary": False, "default_root_dir": tempfile.mkdtemp()}
    >>> trainer = Trainer(max_steps=2, callbacks=[PosteriorFigures(1, weights=2)], **quiet)
    >>> trainer.fit(DeepEnsemble(mlp(2, [8], 2), members=1), TwoGaussians())
    >>> sorted(os.listdir(f"{trainer.default_root_dir}/figures"))
    ['posterior-marginals-2.png', 'posterior-pair-2.png', 'posterior-trajectories-2.png']
    """

    persistent = {"_steps": list, "_followed": list, "_looks": int}
    _steps: list[int]
    _followed: list[Tensor]
    _looks: int

    def __init__(
        self,
        every_n_steps: int = 50,
        draw_every: int = 10,
        weights: int = 6,
        module: str | None = None,
    ) -> None:
        super().__init__(module, every_n_steps)
        for name, value, least in (("draw_every", draw_every, 1), ("weights", weights, 2)):
            check_count(name, value, least)
        self.draw_every, self.weights = draw_every, weights

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._folder = log_folder(trainer)
        super().on_train_start(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if not self._looks:
            self._see(trainer, pl_module)  # it was stopped before the first look
        is_drawn = self._looks % self.draw_every == 0  # and nothing was seen since
        if (network := self._current(pl_module)) is not None and not is_drawn:
            self._draw(trainer, network.weights())
        super().on_train_end(trainer, pl_module)

    def begin(self, weights: Params) -> None:
        assert self.network is not None
        sym = self.network.symmetries
        names = [*(g.name for g in sym.permutations if g.name in sym.weights), *sym.weights]
        first = next(iter(names), next(iter(sym.shapes)))
        size = sym.shapes[first].numel()
        if self._followed and self._followed[0].shape[-1] != min(self.weights, size):
            self.forget()  # it has become another network
        self._layer = first
        count = min(self.weights, size)
        self._places = ((torch.arange(count) + 0.5) * size / count).long()
        self._layout_logged = False

    def look(self, trainer: Any, pl_module: Any, weights: Params) -> None:
        if not self._layout_logged:
            log_layout(trainer, _LAYOUT)
            self._layout_logged = True
        forms = self._forms(weights)
        size = self.network.symmetries.shapes[self._layer].numel() if self.network else 0
        self._steps.append(figure_step(trainer))
        self._followed.append(
            torch.stack([f[self._layer].reshape(-1, size)[:, self._places] for f in forms])
            .detach()
            .float()
            .cpu()
        )
        if len(self._steps) > _POINTS:
            self._steps, self._followed = self._steps[::2], self._followed[::2]
        self._looks += 1
        if self._looks % self.draw_every == 0:
            self._draw(trainer, weights)

    def _forms(self, weights: Params) -> tuple[Params, Params, Params]:
        assert self.network is not None
        sym = self.network.symmetries
        return weights, canonicalise(weights, sym, permutation=None), canonicalise(weights, sym)

    def _draw(self, trainer: Any, weights: Params) -> None:
        from lightning_bnn.plots import hexbin_figure, histograms_figure
        from lightning_bnn.plots.axes import short_names, titled
        from lightning_bnn.plots.weights import trajectories_figure

        assert self.network is not None
        network, sym = self.network, self.network.symmetries
        followed = torch.stack(self._followed, 1)  # (forms, times, members, weights)
        places = [_index(int(k), sym.shapes[self._layer]) for k in self._places]
        by_form = dict(zip(_FORMS, followed, strict=True))
        pairs = {form: _finite(v[..., [0, -1]].flatten(0, 1)) for form, v in by_form.items()}
        names = short_names([_path(network, name) for name in sym.weights])
        short = dict(zip(sym.weights, names.values(), strict=True))
        layers = _some([name for name in sym.weights if len(sym.shapes[name]) > 1], _LAYERS)
        marginals = {
            layer: {
                form: _sample(w[layer])
                for form, w in zip(_FORMS[:2], self._forms(weights)[:2], strict=True)
            }
            for layer in layers
        }
        first = {form: v[:, 0] for form, v in by_form.items()}
        curves = _curves(trainer, network)
        labels = places[0], places[-1]
        drawn: list[tuple[str, dict[str, Any], Any]] = [
            ("trajectories", first, lambda f: trajectories_figure(self._steps, f, places)),
            ("pair", pairs, lambda f: hexbin_figure(f, labels)),
            (
                "marginals",
                marginals,
                lambda f: histograms_figure({short[layer]: v for layer, v in f.items()}),
            ),
            *((n, {"": f}, lambda f: f[""]) for n, (f, _) in curves.items()),
        ]
        answers = {
            "trajectories": f"Last tenth: moves {_spread(first['raw'], 0.1):.2g} % of its range.",
            "pair": f"Second half: {_spread(by_form['raw'], 0.5):.2g} % of the whole spread.",
            "marginals": _tails(weights, layers, short),
            **{name: answer for name, (_, answer) in curves.items()},
        }
        step, title = figure_step(trainer), network.title(trainer.lightning_module)
        about = dict.fromkeys(("trajectories", "pair"), f"{short[self._layer]} of {title}")
        about |= {"marginals": f"{_FORMS[0]} and {_FORMS[1]} of {title}"}

        def drawn_with_title(name: str, draw: Any, panels: dict[str, Any]) -> Any:
            return titled(draw(panels), answers[name], about.get(name, title))

        for name, panels, draw in drawn:
            tag = f"{self._prefix(trainer)}posterior/{name}"
            log_panels(
                trainer, self._folder, tag, panels, partial(drawn_with_title, name, draw), step
            )


def _path(network: Network, name: str) -> str:
    """Return the name of a tensor inside the LightningModule."""
    return f"{network.name}.{name}" if network.name else name


def _index(flat_index: int, shape: torch.Size) -> str:
    """Return the index of an entry of a tensor, as torch writes it."""
    return str([int(k) for k in torch.unravel_index(torch.tensor(flat_index), shape)])


def _some(names: list[str], count: int) -> list[str]:
    """Select this many names, from the first layer to the last."""
    steps = torch.linspace(0, len(names) - 1, min(count, len(names)))
    return [names[int(k)] for k in steps.round()]


def _finite(points: Tensor) -> Tensor:
    return points[points.isfinite().all(-1)]


def _sample(weights: Tensor) -> Tensor:
    flat = weights.detach().flatten()
    some = flat[:: max(1, len(flat) // _SAMPLES)].float().cpu()
    return some[some.isfinite()]


def _spread(values: Tensor, share: float) -> float:
    """Compare ranges of weights ``(times, ...)`` at the end and in all of a run, in per cent."""
    last = values[-max(2, round(share * len(values))) :]
    ranges = [v.quantile(0.95, 0) - v.quantile(0.05, 0) for v in (last, values)]
    return 100 * float((ranges[0] / ranges[1].clamp_min(1e-12)).nanmean())


def _tails(weights: Params, layers: list[str], short: dict[str, str]) -> str:
    """Say how far the largest weight of these layers is from the others of its layer."""
    far = {name: float(weights[name].abs().max() / weights[name].std()) for name in layers}
    worst = max(far, key=lambda name: far[name])
    return f"The largest weight is {far[worst]:.1f} deviations ({short[worst]})."


def _curves(trainer: Any, network: Network) -> dict[str, tuple[Any, str]]:
    """Draw the curves of callbacks with a history of the same network, and say how they end."""
    from lightning_bnn.plots.weights import curves_figure

    figures: dict[str, tuple[Any, str]] = {}
    for callback in trainer.callbacks:
        if not isinstance(callback, (PermutationTau, MassGap, OrbitDrift)) or not callback.history:
            continue
        if callback.network is None or callback.network.name != network.name:
            continue
        last = callback.history[-1][1]
        tag, names, answer = _end_of(callback, network, last)
        if isinstance(callback, MassGap) and callback.largest:
            figures["largest"] = _largest(callback, network)
        history = [row for row in callback.history if len(row[1]) == len(last)]
        steps = [step for step, _ in history]  # since it has so many layers
        columns = torch.tensor([row[: len(names)] for _, row in history]).T
        curves = dict(zip(names, columns, strict=True))
        figures[tag] = curves_figure(steps, curves, tag), answer
    return figures


def _end_of(callback: Any, network: Network, last: list[float]) -> tuple[str, list[str], str]:
    """Return the tag of a callback, names of its curves, and a sentence on their last values."""
    from lightning_bnn.plots.axes import short_names

    if isinstance(callback, PermutationTau):
        names = short_names([_path(network, name) for name in callback.layers]).values()
        pairs = 50 * (1 - sum(last) / len(last))
        answer = f"{pairs:.2g} % of pairs of units still change places."
        return "tau", [*names], answer
    if isinstance(callback, OrbitDrift):
        kept, by_chance = 100 * last[0], 100 * last[2]
        answer = f"{kept:.2g} % of the steps are idle (random: {by_chance:.2g} %)."
        return "drift", ["last steps", "path", "chance"], answer
    saved = 100 * (1 - last[1] / last[0]) if last[0] else 0.0
    return "mass", ["as trained", "minimum"], f"Rescaling could save {saved:.2g} % of the penalty."


def _largest(gap: MassGap, network: Network) -> tuple[Any, str]:
    """Draw the largest weight of every layer, and name the layer of the largest."""
    from lightning_bnn.plots.axes import short_names
    from lightning_bnn.plots.weights import layers_figure

    names = short_names([_path(network, name) for name in gap.largest]).values()
    rows = dict(zip(names, gap.largest.values(), strict=True))
    top = max(rows, key=lambda name: rows[name][0])
    figure = layers_figure(rows, ("as trained", "at the minimum"), "largest weight")
    return figure, f"The largest weight, {rows[top][0]:.2g}, is in {top}."

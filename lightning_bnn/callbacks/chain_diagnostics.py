"""Agreement of parallel chains: as functions, and as weights with and without symmetries."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_bnn._compat import figure_step
from lightning_bnn.callbacks.figure_logging import log_folder, log_panels
from lightning_bnn.callbacks.onlooker import Onlooker, RefusedArgument
from weightsym import Symmetries, canonicalise, discover
from weightsym import params as P
from weightsym.params import Params, check_count, elsewhere, random_numbers, where_precise

__all__ = ["ChainDiagnostics"]


class ChainDiagnostics(Onlooker):
    r"""Logs :math:`\hat R` and effective sample sizes of chains (`SGHMC`, `SMILE`, `HMC`, `MILE`).

    These are computed for predictions on some inputs (``function``), for some weights (``weights``)
    and for the same weights in canonical form (``canonical``), and logged as
    ``posterior/rhat_max/<space>``, ``posterior/rhat_median/<space>``, ``posterior/ess_min/<space>``
    (of the mean) and ``posterior/ess_tail_min/<space>`` (of 5 and 95 % quantiles), with the figures
    ``posterior/chains/<space>`` and ``posterior/chains/rhat``. Chains in different copies of one
    mode agree as functions and differ as weights. The canonical form shows whether symmetries are
    the reason.

    Args:
        every_n_epochs: number of epochs between two diagnostics.
        inputs: number of examples of the first batch whose predictions are compared.
        weights: number of weights to follow.

    >>> from lightning import Trainer
    >>> from lightning_bnn.datamodules import NoisySine
    >>> from lightning_bnn.likelihoods import Gaussian
    >>> from lightning_bnn.models import mlp
    >>> from lightning_bnn.modules import SGHMC
    >>> module, chains = SGHMC(mlp(1, [4], 1), members=2, likelihood=Gaussian()), ChainDiagnostics()
    >>> quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    >>> trainer = Trainer(max_epochs=4, enable_model_summary=False, callbacks=[chains], **quiet)
    >>> trainer.fit(module, NoisySine())
    >>> {space: tuple(values.shape) for space, values in chains.values.items()}  # chains, times
    {'function': (2, 4, 10), 'weights': (2, 4, 13), 'canonical': (2, 4, 13)}
    """

    def __init__(self, every_n_epochs: int = 1, inputs: int = 32, weights: int = 500) -> None:
        settings = {"every_n_epochs": every_n_epochs, "inputs": inputs, "weights": weights}
        for name, value in settings.items():
            check_count(name, value)
        self.every_n_epochs, self.inputs, self.weights = every_n_epochs, inputs, weights
        self.values: dict[str, Tensor] = {}
        """The values that are followed in every space, ``(chains, times, numbers)``."""
        self._probe: tuple[Any, ...] = ()
        self._symmetries: Symmetries | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"probe": [x.cpu() if isinstance(x, Tensor) else x for x in self._probe]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._probe = tuple(state_dict["probe"])

    # -------------------------------------------------------- hooks
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if not callable(getattr(_state_of(pl_module), "chains", None)):
            raise RefusedArgument(
                f"ChainDiagnostics needs a module with chains, such as SGHMC, HMC or MILE; "
                f"{type(pl_module).__name__} has none."
            )
        self.values, self._symmetries = {}, None
        self._folder = log_folder(trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *_: Any) -> None:
        if not self._probe:
            inputs = pl_module.inputs_and_targets(batch)[0]
            self._probe = tree_map(lambda t: t[: self.inputs].detach(), tuple(inputs))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        last = trainer.current_epoch + 1 == trainer.max_epochs
        due = (trainer.current_epoch + 1) % self.every_n_epochs == 0
        if not (due or last) or not trainer.is_global_zero:
            return
        from lightning_bnn.metrics.convergence import LEAST, chain_numbers

        with random_numbers(elsewhere(pl_module.parameters())):
            self._collect(pl_module)
        if not self.values or next(iter(self.values.values())).shape[1] < LEAST:
            return
        healthy = {space: _healthy(values) for space, values in self.values.items()}
        for space, values in healthy.items():
            numbers = chain_numbers(values)
            tagged = {f"posterior/{name}/{space}": value for name, value in numbers.items()}
            pl_module.log_dict(tagged, rank_zero_only=True, batch_size=1)
        self._draw(trainer, healthy)

    def _draw(self, trainer: Any, healthy: dict[str, Tensor]) -> None:
        from lightning_bnn.metrics import rhat
        from lightning_bnn.plots.axes import titled
        from lightning_bnn.plots.weights import chains_figure

        title = type(trainer.lightning_module).__name__
        reductions = {space: rhat(values) for space, values in healthy.items()}
        panels = {**healthy, "rhat": None}
        space, worst = next((space, float(values.max())) for space, values in reductions.items())
        verdict = "chains agree" if worst < 1.01 else "no agreement yet"
        answer = f"R-hat {worst:.3f} ({space}): {verdict}."

        def draw(some: dict[str, Any]) -> Any:
            panels_of_values = {space: values for space, values in some.items() if space in healthy}
            figure = chains_figure(panels_of_values, reductions, "rhat" in some)
            return titled(figure, answer, title)

        step = figure_step(trainer)
        log_panels(trainer, self._folder, "posterior/chains", panels, draw, step)

    # -------------------------------------------------------- what is followed
    @torch.no_grad()
    def _collect(self, pl_module: Any) -> None:
        """Evaluate the networks that the chains have reached since the last time."""
        times = next(iter(self.values.values())).shape[1] if self.values else 0
        chains = _state_of(pl_module).chains(times)
        if not chains:
            return
        shape = next(iter(chains.values())).shape[:2]
        new = {name: t.flatten(0, 1) for name, t in chains.items()}
        rows = {"function": self._predictions(pl_module, new), **self._weights(pl_module, new)}
        for space, values in rows.items():
            latest = values.flatten(1).cpu().double().unflatten(0, shape)
            before = self.values.get(space)
            self.values[space] = latest if before is None else torch.cat([before, latest], 1)

    def _predictions(self, pl_module: Any, networks: Params) -> Tensor:
        from lightning_bnn.likelihoods import Categorical

        template = pl_module.template
        first = next(iter(networks.values()))
        inputs = tree_map(lambda t: t.to(first.device), pl_module.cast(self._probe))
        training = template.training
        try:
            outputs = P.apply(template.eval(), networks, *inputs)
        finally:
            template.train(training)
        is_categorical = isinstance(pl_module.likelihood, Categorical)
        outputs = where_precise(outputs).double()  # in float32 sure predictions are all 1
        return outputs.softmax(-1) if is_categorical else outputs

    def _weights(self, pl_module: Any, networks: Params) -> dict[str, Tensor]:
        """Return some weights, raw and in canonical form if the symmetries can be found."""
        from lightning_bnn.metrics.convergence import some_of

        spaces = {"weights": networks}
        if self._symmetries is None:
            self._find(pl_module)
        if self._symmetries is not None:
            spaces["canonical"] = self._canonical(networks, self._symmetries)
        names = P.weight_names(pl_module.template)
        rows = {space: P.ravel(stack, names, stacked=True)[0] for space, stack in spaces.items()}
        return {space: some_of(weights, self.weights) for space, weights in rows.items()}

    def _canonical(self, networks: Params, sym: Symmetries) -> Params:
        """Bring networks to canonical form, except diverged ones."""
        finite = torch.stack([networks[n].flatten(1).isfinite().all(1) for n in sym.weights]).all(0)
        if not bool(finite.any()):
            return networks
        healthy = {n: t[finite] for n, t in networks.items()}
        form = canonicalise(healthy, sym)
        result = {n: t.clone() for n, t in networks.items()}
        for name, tensor in form.items():
            result[name][finite] = tensor
        return result

    def _find(self, pl_module: Any) -> None:
        template, _, example = pl_module.weights()
        try:
            self._symmetries = discover(template, *example)
        except ValueError as error:
            rank_zero_warn(f"ChainDiagnostics has no canonical form: {error}")


def _state_of(module: Any) -> Any:
    """Find the object with the chains: the state of a module of this package, or a module."""
    return getattr(module, "state", module)


def _healthy(values: Tensor) -> Tensor:
    """Select the finite chains, or return zeros if there are none."""
    finite = values.isfinite().flatten(1).all(1)
    return values[finite] if bool(finite.any()) else torch.zeros_like(values)

"""Laplace approximations: Gaussians around trained networks, from the curvature of their loss."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, get_args

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lightning_bnn import params as P
from lightning_bnn.arguments import not_negative, positive
from lightning_bnn.harvest import ends
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.metrics.validation import option
from lightning_bnn.modules.ensemble import DeepEnsemble
from lightning_bnn.modules.predictive import Predictive
from lightning_bnn.modules.training_data import Batch, Rereadable, training_source
from lightning_bnn.named_tensors import NamedTensors
from lightning_bnn.params import Params
from lightning_bnn.posteriors import CurvatureBlock, LaplaceGaussian, Mixture, Posterior
from lightning_bnn.posteriors.dropout import Layers
from lightning_bnn.posteriors.laplace import Prediction
from lightning_bnn.posteriors.laplace_fit import (
    Structure,
    curvature,
    last_layer_name,
    likeliest_precision,
    without_factors,
)
from lightning_bnn.posteriors.output_curvature import curvature_root, noise_factor

__all__ = ["Laplace"]


class Laplace(DeepEnsemble):
    r"""A maximum of the posterior, and the Gaussian that its curvature speaks for.

    .. math:: \omega \sim N\big(\hat\omega,\; T (H + \lambda I)^{-1}\big)

    H is the generalised Gauss-Newton matrix of the summed negative log-likelihood, computed by
    laplace-torch on the training data after the last epoch, so that checkpoints from the end hold
    it, or before a test of networks that have none. While it trains, validation judges the members
    as they are. With members, a mixture.

    Args:
        network: gives the computation; it is copied, not changed.
        members: how many networks, each with a Gaussian of its own.
        structure: of the curvature: a ``"full"`` matrix, Kronecker factors of each layer
            (``"kron"``) or its ``"diag"``-onal.
        layers: ``"all"`` weights are random, or those of the ``"last"`` linear layer; by default
            all, or the last for Kronecker factors of a network with layers that have none
            (BatchNorm).
        prior_std: standard deviation of a Gaussian prior over all weights, in training; None leaves
            regularisation to the optimizer's weight decay.
        prior_precision: :math:`\lambda`; by default that of largest marginal likelihood.
        temperature: T.
        prediction: by ``"linearised"`` networks, or by the ``"network"`` itself.
        **kwargs: what every module takes, see `BayesianModule`.

    References:
        | Laplace Redux (Daxberger et al., 2021)
        | https://arxiv.org/abs/2106.14806
    """

    takes_samplers = False

    can_be_shared = False

    def __init__(
        self,
        network: nn.Module,
        members: int = 1,
        structure: Structure = "kron",
        layers: Layers | None = None,
        prior_std: float | None = None,
        prior_precision: float | None = None,
        temperature: float = 1.0,
        prediction: Prediction = "linearised",
        **kwargs: Any,
    ) -> None:
        option("structure", structure, get_args(Structure))
        if layers is not None:
            option("layers", layers, get_args(Layers))
        option("prediction", prediction, get_args(Prediction))
        if prior_precision is not None:
            positive("prior_precision", prior_precision)
        not_negative("temperature", temperature)
        super().__init__(network, members=members, prior_std=prior_std, **kwargs)
        curvature_root(self.likelihood)
        if structure == "kron":
            noise_factor(self.likelihood)
        self.structure, self.prediction, self.temperature = structure, prediction, temperature
        self.prior_precision = prior_precision
        chosen = layers or self._fitting_layers()
        self.last_layer = last_layer_name(self.template) if chosen == "last" else None
        self.fitted = NamedTensors()

    def _fitting_layers(self) -> Layers:
        """All, unless some have no Kronecker factors."""
        found = without_factors(self.template) if self.structure == "kron" else []
        if not found or not any(isinstance(m, nn.Linear) for m in self.template.modules()):
            return "all"
        rank_zero_info(
            f"Laplace: {', '.join(found)} of {type(self.template).__name__} has no Kronecker "
            "factors, so that the curvature is that of the last layer alone (`layers='last'`)."
        )
        return "last"

    # -------------------------------------------------------- fit
    def on_train_start(self) -> None:
        """What was fitted belongs to other weights; see early whether the curvature can be had."""
        super().on_train_start()
        self.fitted.hold({})
        example = self.example()
        if example:
            self._rehearse(example)

    def _rehearse(self, example: tuple[Any, ...]) -> None:
        """The curvature of two made-up examples, to fail before the training and not after it."""
        with torch.inference_mode(False), torch.no_grad():
            network = {n: t[0].clone() for n, t in self.member_stack().items()}
            inputs = self._cast(
                [x.to(self.device) if isinstance(x, Tensor) else x for x in example]
            )
            outputs = P.apply(copy.deepcopy(self.template).eval(), network, *inputs)
        known = isinstance(self.likelihood, Categorical)
        targets = outputs[:, 0].long() * 0 if known else torch.zeros_like(outputs)
        self._curvature(network, [(inputs, targets)], progress=False)

    def on_train_epoch_start(self) -> None:
        """A fit for an end that was none belongs to other weights."""
        self.fitted.hold({})

    def on_train_epoch_end(self) -> None:
        """Fit after the last epoch, before the checkpoint is made."""
        super().on_train_epoch_end()
        if ends(self.trainer):
            self._try_to_fit(training_source(self))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """A callback may have ended the run since."""
        super().on_save_checkpoint(checkpoint)
        if self.fits_now and not self.fitted.tensors() and ends(self.trainer):
            self._try_to_fit(training_source(self))
            found = self.fitted.tensors().items()
            checkpoint["state_dict"].update({f"fitted.{name}": t for name, t in found})

    def on_train_end(self) -> None:
        """Whatever the end was."""
        if not self.fitted.tensors():
            self._try_to_fit(training_source(self))

    def _try_to_fit(self, source: Any) -> None:
        try:
            self.fit_to(source)
        except ValueError as error:  # the trained weights are worth more
            rank_zero_warn(f"Laplace: the members are trained, but there is no curvature: {error}")

    def fit_to(self, source: Any) -> None:
        """Compute the curvature of every member.

        Args:
            source: the training data: a datamodule, or a loader of batches as the network takes
                them.
        """
        with torch.inference_mode(False):
            batches = Rereadable(self, source)
            found: Params = {}
            for m in self.healthy().tolist():
                network = {n: t[m].clone() for n, t in self.member_stack().items()}
                found |= self._fit_member(m, network, batches)
        if self.num_data is not None and batches.count != self.num_data:
            rank_zero_warn(
                f"The train loader gives {batches.count} of {self.num_data} examples "
                "(`drop_last`?): these are the data of the curvature."
            )
        self.fitted.hold(found)

    def _curvature(
        self, network: Params, batches: Iterable[Batch], progress: bool
    ) -> list[CurvatureBlock]:
        return curvature(
            self.template, network, batches, self.likelihood, self.structure, self.last_layer,
            progress,
        )  # fmt: skip

    def _fit_member(self, m: int, network: Params, batches: Rereadable) -> Params:
        blocks = self._curvature(network, batches, self._shows_progress())
        precision = self.prior_precision
        if precision is None:
            precision = likeliest_precision(blocks, network)
            rank_zero_info(f"Laplace, member {m}: prior precision {precision:.4g}.")
        like = blocks[0].eigenvalues
        found = {f"{m}/precision": torch.tensor(precision, dtype=torch.float64, device=like.device)}
        for k, block in enumerate(blocks):
            for part in ("eigenvalues", "left", "right"):
                tensor = getattr(block, part)
                if tensor is not None:
                    found[f"{m}/{k}/{part}"] = tensor
        return found

    def _shows_progress(self) -> bool:
        trainer = self._trainer
        return (
            trainer is not None and trainer.is_global_zero and bool(trainer.progress_bar_callback)
        )

    # -------------------------------------------------------- the posterior
    def unfitted(self) -> str:
        """Also of one member, although the user may have trained it: then it is no mistake."""
        return "it is the curvature around the networks as they were given that counts"

    def posterior(self) -> Posterior:
        """The Gaussian, or the mixture of the members' Gaussians; before the fit, the members."""
        if not self.fitted.tensors():
            return self._members()
        modes = [self._mode(m) for m in self.healthy().tolist()]
        return modes[0] if len(modes) == 1 else Mixture(modes)

    def _mode(self, m: int) -> LaplaceGaussian:
        held = self.fitted.tensors()
        network = {n: t[m] for n, t in self.member_stack().items()}
        blocks = []
        for k, names in enumerate(self._block_names()):
            at = f"{m}/{k}"
            left, right = held.get(f"{at}/left"), held.get(f"{at}/right")
            blocks.append(CurvatureBlock(names, held[f"{at}/eigenvalues"], left, right))
        precision = float(held[f"{m}/precision"])
        return LaplaceGaussian(
            network, blocks, precision, self.temperature, self.prediction, self.last_layer
        )

    def _block_names(self) -> list[tuple[str, ...]]:
        """Weights of each block: those of a layer, or all that vary."""
        prefix = "" if not self.last_layer else f"{self.last_layer}."
        every = [n for n, p in self.template.named_parameters() if p.requires_grad]
        names = [n for n in every if self.last_layer is None or n.startswith(prefix)]
        return [(n,) for n in names] if self.structure == "kron" else [tuple(names)]

    @property
    def judged_samples(self) -> int:
        """Networks that are drawn; the members before the fit."""
        return self.eval_samples if self.fitted.tensors() else len(self.healthy())

    def predictive(self, samples: int | None = None) -> Predictive:
        """The mean prediction as a plain module; linearised networks are no networks."""
        if self.fitted.tensors() and self.prediction == "linearised" and self.last_layer is None:
            raise ValueError(
                "Linearised networks cannot be exported: take `layers='last'` or "
                "`prediction='network'`."
            )
        return super().predictive(samples)

    def _start(self, judge: Any) -> None:
        """Fit first, if that is still to be done and there are data."""
        if not self.fitted.tensors() and not self.fits_now:
            source = training_source(self)
            if source is None:
                rank_zero_warn(
                    "There are no training data for the curvature, the members predict without "
                    "their Gaussians: pass a datamodule, or a checkpoint of a finished fit."
                )
            else:
                self._try_to_fit(source)
        super()._start(judge)

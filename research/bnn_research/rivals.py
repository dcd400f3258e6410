"""Published tests of lineage, each a few lines from the formula of its paper."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from scipy.stats import combine_pvalues, spearmanr
from torch import Tensor, nn
from torch.nn.functional import normalize

from weightsym.params import Params

_LEAST = 1e-300


@dataclass(frozen=True)
class Names:
    """The names that the tests ask for; those that a network lacks are empty.

    Attributes:
        layers: modules whose outputs are compared, one for each layer.
        units: by layer the tensor that writes its hidden units.
        embedding: the table of tokens, or the map of patches.
        gated: whether the layers have gates.
    """

    layers: Sequence[str]
    units: Sequence[str]
    embedding: str = ""
    gated: bool = False


@dataclass(frozen=True, eq=False)
class Suspect:
    """A network as the tests see it: its weights, and what its modules give for some inputs."""

    params: Params
    outputs: Mapping[str, Tensor]
    names: Names

    @classmethod
    def of(cls, module: nn.Module, params: Params, names: Names, inputs: Tensor) -> Suspect:
        """Run a network once, and keep the outputs of the modules that are compared."""
        outputs: dict[str, Tensor] = {}
        wanted = [*names.layers]
        if names.gated:
            wanted += [f"{layer}.{part}" for layer in names.layers for part in ("gate", "up")]

        def keep(name: str) -> Callable[..., None]:
            def hook(_: nn.Module, __: Any, output: Tensor) -> None:
                flat = output.movedim(1, -1) if output.ndim == 4 else output
                outputs[name] = flat.detach().flatten(0, -2)

            return hook

        hooks = [module.get_submodule(n).register_forward_hook(keep(n)) for n in wanted]
        try:
            with torch.no_grad():
                torch.func.functional_call(module, params, (inputs,))
        finally:
            for hook in hooks:
                hook.remove()
        return cls(params, outputs, names)

    @property
    def tokens(self) -> Tensor:
        """The embeddings of all tokens, or of all pixels of a patch."""
        table = self.params[self.names.embedding]
        width = self.matrix(self.names.layers[0], "q").shape[1]
        return table if table.shape[1] == width else table.mT

    def matrix(self, layer: str, part: str) -> Tensor:
        """The weight of one linear map of a layer."""
        return self.params[f"{layer}.{part}.weight"]


def phi_u(a: Suspect, b: Suspect) -> float:
    """Score units in their places: rank correlation of the best assignment, Fisher over layers.

    References:
        | Independence Tests for Language Models (Zhu et al., 2025)
        | https://arxiv.org/abs/2502.12292
    """
    pairs = [(a.params[name].flatten(1), b.params[name].flatten(1)) for name in a.names.units]
    return _fisher([(_assigned(x, y), np.arange(len(x))) for x, y in pairs])


def phi_match(a: Suspect, b: Suspect) -> float:
    """Score units matched alike by gates and by what they gate, from activations (Zhu et al.)."""
    if not a.names.gated:
        return math.nan

    def order(name: str) -> np.ndarray:
        x, y = (s.outputs[name] - s.outputs[name].mean(0) for s in (a, b))
        return _assigned(x.mT, y.mT)

    return _fisher([(order(f"{n}.gate"), order(f"{n}.up")) for n in a.names.layers])


def pcs(a: Suspect, b: Suspect) -> float:
    """Return the cosine of all weights, HuRef's PCS."""
    names = [name for name, t in a.params.items() if t.ndim > 1]
    x, y = (torch.cat([s.params[n].flatten() for n in names]) for s in (a, b))
    return _cosine(x, y)


def ics(a: Suspect, b: Suspect) -> float:
    r"""Return the mean cosine of :math:`X W_q W_k' X'`, :math:`X W_v W_o X'`, :math:`X W_1 W_2 X'`.

    References:
        | HuRef: Human-Readable Fingerprint for Large Language Models (Zeng et al., 2024)
        | https://arxiv.org/abs/2312.04828
    """
    if not a.names.embedding:
        return math.nan
    return float(np.mean([_cosine(x, y) for x, y in zip(_terms(a), _terms(b), strict=True)]))


def _terms(s: Suspect) -> list[Tensor]:
    x, terms = s.tokens, []
    for layer in s.names.layers:
        q, k, v, o, up, down = (s.matrix(layer, n) for n in ("q", "k", "v", "o", "up", "down"))
        terms += [x @ q.mT @ k @ x.mT, x @ v.mT @ o.mT @ x.mT, x @ up.mT @ down.mT @ x.mT]
    return terms


def awm(a: Suspect, b: Suspect) -> float:
    """Match the dimensions of embeddings, then return the unbiased CKA of queries and keys.

    References:
        | AWM: Accurate Weight-Matrix Fingerprint for Large Language Models (2025)
        | https://arxiv.org/abs/2510.06738
    """
    if not a.names.embedding:
        return math.nan
    cosines = normalize(b.tokens, dim=0).mT @ normalize(a.tokens, dim=0)
    rows, order = linear_sum_assignment(cosines.abs().numpy(), maximize=True)
    signs = cosines[rows, order].sign()
    values = []
    for layer in a.names.layers:
        for part in ("q", "k"):
            mine = a.matrix(layer, part)[:, order] * signs
            values.append(_unbiased_cka(mine.mT, b.matrix(layer, part).mT))
    return float(np.mean(values))


def _unbiased_cka(x: Tensor, y: Tensor) -> float:
    """CKA of rows with the unbiased estimates of HSIC."""

    def hsic(k: Tensor, m: Tensor) -> float:
        n = len(k)
        apart = k.sum() * m.sum() / ((n - 1) * (n - 2)) - 2 * k.sum(0) @ m.sum(0) / (n - 2)
        return float(((k * m).sum() + apart) / (n * (n - 3)))

    k, m = ((z @ z.mT).double().fill_diagonal_(0) for z in (x, y))
    return hsic(k, m) / max(hsic(k, k) * hsic(m, m), _LEAST) ** 0.5


def reef(a: Suspect, b: Suspect) -> float:
    """Return the linear CKA of activations for the same inputs, averaged over layers.

    References:
        | REEF: Representation Encoding Fingerprints for Large Language Models (2024)
        | https://arxiv.org/abs/2410.14273
    """

    def cka(x: Tensor, y: Tensor) -> float:
        x, y = x - x.mean(0), y - y.mean(0)
        return float((x.mT @ y).norm() ** 2 / ((x.mT @ x).norm() * (y.mT @ y).norm()))

    return float(np.mean([cka(a.outputs[n], b.outputs[n]) for n in a.names.layers]))


def spectra(a: Suspect, b: Suspect) -> float:
    """Return how close the singular values of all matrices are: 1 if they are equal."""

    def apart(name: str) -> float:
        x, y = (torch.linalg.svdvals(s.params[name].flatten(1)) for s in (a, b))
        return float((x / x.norm() - y / y.norm()).norm())

    return 1 - float(np.mean([apart(name) for name, t in a.params.items() if t.ndim > 1]))


RIVALS: Mapping[str, Callable[[Suspect, Suspect], float]] = {
    "phi_U": phi_u,
    "phi_MATCH": phi_match,
    "HuRef PCS": pcs,
    "HuRef ICS": ics,
    "AWM": awm,
    "REEF": reef,
    "spectra": spectra,
}
"""Scores that grow with what two networks have in common, NaN where one is not defined."""


def _assigned(x: Tensor, y: Tensor) -> np.ndarray:
    """The row of x for each row of y, by cosines."""
    cosines = normalize(y, dim=1) @ normalize(x, dim=1).mT
    return np.asarray(linear_sum_assignment(cosines.numpy(), maximize=True)[1])


def _fisher(orders: Sequence[tuple[np.ndarray, np.ndarray]]) -> float:
    """Minus log10 of the probability of rank correlations as high, combined."""
    p = [float(spearmanr(x, y, alternative="greater").pvalue) for x, y in orders]
    return -math.log10(max(float(combine_pvalues(np.clip(p, _LEAST, 1)).pvalue), _LEAST))


def _cosine(x: Tensor, y: Tensor) -> float:
    return float((x * y).sum() / (x.norm() * y.norm()))

"""The methods of the table of UCI regression, one entry each."""

from __future__ import annotations

from functools import partial
from typing import Any

from bnn_research.uci_stacks import Contestant
from lightning_bnn import methods, samplers
from lightning_bnn.methods import Keeping
from lightning_bnn.methods.mc_dropout import with_dropout


def _second_half(length: int) -> Keeping:
    """Store about fifty networks in the second half of a run."""
    return Keeping(burn_in=length // 2, every_n_epochs=max(1, length // 2 // 50))


def _langevin(title: str, sampler: Any, *rates: float) -> Contestant:
    """Return a sampler with batches, at a constant rate."""
    return Contestant(
        title, lambda _, epochs: methods.SGMCMC(keeping=_second_half(epochs)),
        lambda parameters, rate, _, rows: sampler(parameters, rate, num_data=rows), rates,
        floor=1.0, warm_start=True,
    )  # fmt: skip


def _full_batch(title: str, method: Any, sampler: Any, **more: Any) -> Contestant:
    """Return a sampler with the gradients of all the data."""
    return Contestant(
        title, lambda _, length: method(keeping=_second_half(length)),
        lambda parameters, _, length, rows: sampler(parameters, length),
        warm_start=True, full_batch=True, **more,
    )  # fmt: skip


CONTESTANTS = {
    "map": Contestant("MAP", lambda *_: methods.DeepEnsemble(prior_std=1.0)),
    "ensemble": Contestant(
        "ensemble of 5", lambda *_: methods.DeepEnsemble(prior_std=1.0), members=5
    ),
    "dropout": Contestant(
        "MC dropout", lambda *_: methods.MCDropout(prior_std=1.0), settings=(0.005, 0.05),
        network=lambda network, p: with_dropout(network, p, "all"), longer=4,
    ),
    "swag": Contestant(
        "SWAG", lambda _, epochs: methods.SWAG(start=3 * epochs // 4, prior_std=1.0),
        plateau=0.25, floor=0.1,
    ),
    "laplace": Contestant(
        "Laplace", lambda *_: methods.Laplace("full", prior_precision=1.0, prior_std=1.0)
    ),
    "mfvi": Contestant("mean-field VI", lambda *_: methods.MFVI(init_std=0.02), warm_start=True),
    "symmetrized": Contestant(
        "symmetrized VI", lambda *_: methods.SymmetrizedVI(init_std=0.02, every=100),
        warm_start=True,
    ),
    "ivon": Contestant(
        "IVON", lambda *_: methods.VariationalOnlineNewton(prior_std=1.0),
        lambda p, r, _, n: samplers.IVON(p, r, n, hessian_momentum=0.995, hessian_init=1000.0),
        settings=(3e-5, 1e-4), warm_start=True,
    ),
    "sgld": _langevin("SGLD", samplers.SGLD, 2e-5, 2e-4),
    "sghmc": _langevin("SGHMC", samplers.SGHMC, 1e-5, 1e-4),
    "smile": _langevin("SMILE", partial(samplers.SMILE, descent_steps=0), 0.01),
    "hmc": _full_batch(
        "HMC", methods.HamiltonianMonteCarlo,
        lambda p, length: samplers.HMC(p, leapfrog_steps=30, adapt_steps=length // 3),
    ),
    "mile": _full_batch(
        "MILE", methods.MILE,
        lambda p, length: samplers.MCLMC(p, descent_steps=0, adapt_steps=length // 2), members=2,
    ),
}  # fmt: skip
"""Methods by name; a new one is one more entry."""

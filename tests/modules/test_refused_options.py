"""Options that a module refuses, at once or when its optimizer is made."""

import pytest
import torch
from module_cases import network
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

from lightning_bnn import samplers
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.modules import HMC, MFVI, MILE, SGHMC, SWAG, DeepEnsemble, Laplace, MCDropout

LEARNED = Gaussian("learned")
NOT_HMC = "`optimizer` SGHMC is not lightning_bnn.samplers.HMC"


def decaying(parameters):
    return samplers.SGLD(parameters, weight_decay=1e-3)


def precise(parameters):
    return samplers.SGLD(parameters, prior_precision=1.0)


def one_cycle(optimizer):
    return OneCycleLR(optimizer, 0.1, total_steps=9)


REFUSED = [
    (HMC, {"network": network(0.2)}, "`network` has dropout"),
    (HMC, {"likelihood": LEARNED}, "parameters of its own"),
    (HMC, {"optimizer": samplers.SGHMC}, NOT_HMC),
    (HMC, {"optimizer": samplers.MCLMC}, "MCLMC is not lightning_bnn.samplers.HMC"),
    (HMC, {"lr_scheduler": lambda o: o}, "`lr_scheduler` means nothing to HMC"),
    (HMC, {"max_loss": 1.0}, "HMC has no argument `max_loss`"),
    (MILE, {"network": network(0.2)}, "`network` has dropout"),
    (MILE, {"optimizer": samplers.HMC}, "`optimizer` HMC is not lightning_bnn.samplers.MCLMC"),
    (SGHMC, {"every_n_steps": 2, "every_n_epochs": 1}, "Give exactly one of"),
    (SGHMC, {"likelihood": LEARNED}, "`likelihood` has parameters of its own"),
    (SGHMC, {"optimizer": torch.optim.Adam}, "`optimizer` Adam is no sampler"),
    (SGHMC, {"optimizer": decaying}, "Both `prior_std` of the module and `weight_decay`"),
    (DeepEnsemble, {"prior_std": 1.0, "optimizer": precise}, "`prior_std` .* `prior_precision`"),
    (SWAG, {"rank": 1}, "`rank` must be at least 2"),
    (SWAG, {"swa_lr": 0.1, "lr_interval": "step"}, "`swa_lr` needs `lr_interval='epoch'`"),
    (DeepEnsemble, {"lr_interval": "batch"}, "`lr_interval` must be one of epoch, step"),
    (DeepEnsemble, {"members": (2, 2)}, "`members` must be a number, or the first of"),
    (DeepEnsemble, {"members": (1, 2, 3)}, "`members` must be a number, or the first of"),
    *(
        (SWAG, {"swa_lr": 0.1, "lr_scheduler": schedule}, "cannot go before the high rate")
        for schedule in (ReduceLROnPlateau, one_cycle)
    ),
    (DeepEnsemble, {"network": nn.Sequential(nn.LazyLinear(3))}, "lazy parameters"),
    (DeepEnsemble, {"network": nn.Linear(2, 2, dtype=torch.complex64)}, "complex parameters"),
    (DeepEnsemble, {"start_from": "no.pt"}, "no networks at no.pt"),
    (MFVI, {"network": "net"}, "`network` must be a torch.nn.Module"),
    (MFVI, {"network": nn.ReLU()}, "no weights"),
    *(
        (kind, {"optimizer": samplers.SGHMC}, f"SGHMC samples, and {kind.__name__} opti")
        for kind in (MFVI, SWAG, Laplace, MCDropout)
    ),
]


@pytest.mark.bad_input
@pytest.mark.parametrize(("kind", "options", "message"), REFUSED)
def test_options_that_do_not_fit_a_module(kind, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        kind(**{"network": network(), **options}).configure_optimizers()

"""Modules with the arguments of one method each, for constructors and YAML."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lightning_bnn import methods, samplers
from lightning_bnn.bank import read_networks
from lightning_bnn.methods.from_checkpoints import Kind
from lightning_bnn.methods.kept_networks import KeptNetworks, NetworksInMemory
from lightning_bnn.methods.mc_dropout import with_dropout
from lightning_bnn.modules.arguments import joint_arguments
from lightning_bnn.modules.bayesian import Bayesian
from lightning_bnn.modules.members import Numbers
from lightning_bnn.modules.templates import template_of
from lightning_bnn.modules.training_data import TrainingData
from lightning_bnn.named_tensors import NamedTensors
from weightsym import Symmetries
from weightsym.params import check_count

__all__ = [
    "DeepEnsemble",
    "FromCheckpoints",
    "HMC",
    "IVON",
    "Laplace",
    "MCDropout",
    "MFVI",
    "MILE",
    "SGHMC",
    "SMILE",
    "SWAG",
    "SymmetrizedVI",
]


class DeepEnsemble(Bayesian):
    r"""Several networks, each at a maximum of the posterior (of the likelihood without a prior).

    .. math:: L_m = -\frac{1}{B} \sum_i \log p(y_i | x_i, \omega_m) - \frac{1}{N} \log p(\omega_m)

    With ``members=1`` it is ordinary training. The state dict has the names of the network, with a
    leading member dimension.

    Args:
        network: gives the computation; it is copied, not changed.
        members: how many networks.
        **kwargs: of the method, see `lightning_bnn.methods.DeepEnsemble`, and of every module, see
            `Bayesian`.

    References:
        | Simple and Scalable Predictive Uncertainty Estimation (Lakshminarayanan et al., 2017)
        | https://arxiv.org/abs/1612.01474

    >>> import torch
    >>> from lightning_bnn.models import mlp
    >>> ensemble, x = DeepEnsemble(mlp(2, [8], 3), members=4), torch.randn(5, 2)
    >>> members = torch.stack([ensemble.member(k)(x).softmax(-1) for k in range(4)])
    >>> torch.allclose(ensemble(x), members.mean(0), atol=1e-5)
    True
    """

    networks: nn.Module

    arguments = staticmethod(joint_arguments(methods.DeepEnsemble, Bayesian))

    def __init__(self, network: nn.Module, members: Numbers = 5, **kwargs: Any) -> None:
        super().__init__(network=network, members=members, **self.arguments(**kwargs))


class FromCheckpoints(Bayesian):
    """The networks of a bank or of a folder of checkpoints as a posterior, nothing is trained.

    If a bank holds networks of several members of a module, each member has a Gaussian of its own.
    Networks that are drawn from a Gaussian get BatchNorm statistics from one pass over the training
    data. (`Laplace` with ``start_from`` fits its curvature without training, too.)

    Args:
        network: gives the computation; it is copied, not changed.
        source: folder of a bank, folder of checkpoints, or one checkpoint.
        kind: the ``"networks"`` themselves; a ``"diagonal"`` Gaussian with their means and standard
            deviations; or ``"low_rank"``, SWAG's Gaussian through a trajectory.
        last: only the last so many networks.
        rank: deviations of the low-rank Gaussian, by default 20 or all that there are.
        scale: multiplies its covariance.
        prefix: what stands before the names of the network in checkpoints, such as ``"net."``.
        likelihood: what the outputs say about targets, by default ``Categorical``.
        eval_samples: how many networks predict.
        seed: of the draws, by default that of torch.

    >>> import tempfile
    >>> from weightsym import params as P
    >>> from lightning_bnn.bank import CheckpointBank
    >>> from lightning_bnn.models import mlp
    >>> net, bank = mlp(2, [8], 3), CheckpointBank(tempfile.mkdtemp())
    >>> bank.extend(P.populate(net, 6))
    >>> FromCheckpoints(net, str(bank.path), last=4).posterior().size
    4
    """

    def __init__(
        self,
        network: nn.Module,
        source: str,
        kind: Kind = "networks",
        last: int | None = None,
        rank: int | None = None,
        scale: float = 1.0,
        prefix: str | None = None,
        likelihood: nn.Module | None = None,
        eval_samples: int = 20,
        seed: int | None = None,
    ) -> None:
        check_count("last", last, optional=True)
        networks, records = read_networks(source, template_of(network), last, prefix)
        chains = [record.get("member", 0) for record in records]
        super().__init__(
            network=network,
            method=methods.FromCheckpoints(networks, chains, kind, rank, scale),
            likelihood=likelihood,
            eval_samples=eval_samples,
            seed=seed,
        )
        rank_zero_info(f"FromCheckpoints: {len(records)} networks of {source}.")


class HMC(Bayesian):
    r"""Samples of the posterior, exact but for the length of the chains.

    .. math:: U(\omega) = -\sum_i \log p(y_i | x_i, \omega) - \log p(\omega)

    Every training step is one transition, with the gradients of all the data; what batch the loader
    gives at that step does not matter, its batch size says how many examples are computed at a
    time. The data are read once, whole and without augmentation. BatchNorm uses the statistics of
    the given network; dropout is refused. Several processes share the data.

    Args:
        network: gives the computation, and where the first chain starts.
        members: how many chains.
        optimizer: makes the sampler, given parameters.
        **kwargs: of the method, see `lightning_bnn.methods.HMC`, and of every module, see
            `Bayesian`.

    References:
        | What Are Bayesian Neural Network Posteriors Really Like? (Izmailov et al., 2021)
        | https://arxiv.org/abs/2104.14421

    >>> from lightning import Trainer
    >>> from lightning_bnn.datamodules import NoisySine
    >>> from lightning_bnn.likelihoods import Gaussian
    >>> from lightning_bnn.models import mlp
    >>> module = HMC(mlp(1, [4], 1), members=2, likelihood=Gaussian())
    >>> quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    >>> trainer = Trainer(max_epochs=3, enable_model_summary=False, **quiet)
    >>> trainer.fit(module, NoisySine(batch_size=40))  # one batch, so one transition, an epoch
    >>> module.posterior().size  # two chains, kept after each epoch
    6
    """

    networks: nn.Module
    samples: KeptNetworks

    arguments = staticmethod(joint_arguments(methods.HMC, Bayesian, optimizer=samplers.HMC))

    def __init__(self, network: nn.Module, members: Numbers = 1, **kwargs: Any) -> None:
        super().__init__(network=network, members=members, **self.arguments(**kwargs))


class IVON(Bayesian):
    r"""A diagonal Gaussian over the weights of any network, learned at the price of Adam.

    .. math:: L = E_q[\mathrm{NLL}(\omega)] + \frac{1}{N} \big(E_q[-\log p(\omega)] - T H(q)\big)

    The objective is that of `MFVI`; its steps are natural gradients, from one gradient at weights
    that were drawn. The ``optimizer`` is `lightning_bnn.samplers.IVON`, which is told N and the
    prior; its ``hessian_init`` and ``hessian_momentum`` matter most. With members, a mixture.

    Args:
        network: gives the computation and the first means; it is copied, not changed.
        members: how many Gaussians, one for each mode that is found.
        optimizer: makes the optimizer, given parameters.
        **kwargs: of the method, see `lightning_bnn.methods.IVON`, and of every module, see
            `Bayesian`.

    References:
        | Variational Learning is Effective for Large Deep Networks (Shen et al., 2024)
        | https://arxiv.org/abs/2402.17641

    >>> from lightning import Trainer
    >>> from lightning_bnn.datamodules import NoisySine
    >>> from lightning_bnn.likelihoods import Gaussian
    >>> from lightning_bnn.models import mlp
    >>> ivon = lambda parameters: samplers.IVON(parameters, hessian_momentum=0.9)
    >>> module = IVON(mlp(1, [4], 1), optimizer=ivon, likelihood=Gaussian())
    >>> quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    >>> trainer = Trainer(max_epochs=4, enable_model_summary=False, **quiet)
    >>> trainer.fit(module, NoisySine())
    >>> type(module.posterior()).__name__
    'DiagonalGaussian'
    """

    mean: nn.Parameter
    curvature: Tensor

    arguments = staticmethod(joint_arguments(methods.IVON, Bayesian, optimizer=samplers.IVON))

    def __init__(self, network: nn.Module, members: Numbers = 1, **kwargs: Any) -> None:
        super().__init__(network=network, members=members, **self.arguments(**kwargs))


class Laplace(Bayesian):
    r"""A maximum of the posterior, and the Gaussian that its curvature speaks for.

    .. math:: \omega \sim N\big(\hat\omega,\; T (H + \lambda I)^{-1}\big)

    H is the generalised Gauss-Newton matrix of the summed negative log-likelihood on the training
    data. It is computed after the last epoch, so that checkpoints from the end hold it, or before a
    test of networks that have none. While it trains, validation judges the members as they are.
    With members, a mixture.

    Args:
        network: gives the computation; it is copied, not changed.
        members: how many networks, each with a Gaussian of its own.
        **kwargs: of the method, see `lightning_bnn.methods.Laplace`, and of every module, see
            `Bayesian`.

    References:
        | Laplace Redux (Daxberger et al., 2021)
        | https://arxiv.org/abs/2106.14806

    >>> from lightning import Trainer
    >>> from lightning_bnn.datamodules import NoisySine
    >>> from lightning_bnn.likelihoods import Gaussian
    >>> from lightning_bnn.models import mlp
    >>> module = Laplace(mlp(1, [4], 1), structure="full", likelihood=Gaussian())
    >>> quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    >>> trainer = Trainer(max_epochs=1, enable_model_summary=False, **quiet)
    >>> trainer.fit(module, NoisySine())
    >>> module.posterior().sample(5)["1.weight"].shape
    torch.Size([5, 4, 1])
    """

    networks: nn.Module
    fitted: NamedTensors

    arguments = staticmethod(joint_arguments(methods.Laplace, Bayesian))

    def __init__(self, network: nn.Module, members: Numbers = 1, **kwargs: Any) -> None:
        super().__init__(network=network, members=members, **self.arguments(**kwargs))
        lacking = [] if self.method.layers else self.method.lacking_factors(self.template)
        if lacking:
            rank_zero_info(
                f"Laplace: {', '.join(lacking)} of {type(self.template).__name__} has no Kronecker "
                "factors, so that the curvature is that of the last layer alone (`layers='last'`)."
            )

    def fit_to(self, source: Any) -> None:
        """Compute the curvature of every member.

        Args:
            source: the training data: a datamodule, or a loader of batches as the network takes
                them.
        """
        self.method.at_end(self.state, TrainingData(self, source), self.run)


class MCDropout(Bayesian):
    r"""A network with dropout that goes on when it predicts. With members, several such networks.

    .. math:: p(y | x) = \frac1S \sum_s p(y | x, \omega, z_s), \quad z_s \sim \text{dropout}

    Dropout is that of the network, modules and functions alike, or it is put into it with ``p``.
    Nothing else is active in evaluation: BatchNorm uses its statistics.

    Args:
        network: gives the computation; it is copied, not changed.
        members: how many networks.
        p: put dropout of this rate before the linear layers of a network that has none, except its
            first layer: inputs are not dropped.
        **kwargs: of the method, see `lightning_bnn.methods.MCDropout`, and of every module, see
            `Bayesian`.

    References:
        | Dropout as a Bayesian Approximation (Gal and Ghahramani, 2016)
        | https://arxiv.org/abs/1506.02142

    >>> import torch
    >>> from lightning_bnn.models import mlp
    >>> module, x = MCDropout(mlp(2, [8], 3), p=0.5, eval_samples=10), torch.randn(5, 2)
    >>> outputs = module.outputs([x])
    >>> outputs.shape, bool((outputs.std(0) > 0).any())
    (torch.Size([10, 5, 3]), True)
    """

    networks: nn.Module

    arguments = staticmethod(joint_arguments(methods.MCDropout, Bayesian))

    def __init__(
        self, network: nn.Module, members: Numbers = 1, p: float | None = None, **kwargs: Any
    ) -> None:
        dropping = network if p is None else with_dropout(network, p, kwargs.get("layers", "all"))
        super().__init__(network=dropping, members=members, **self.arguments(**kwargs))
        if any(isinstance(m, nn.RNNBase) and m.dropout > 0 for m in self.template.modules()):
            rank_zero_warn("Dropout inside recurrent layers stays off in predictions.")


class MFVI(Bayesian):
    r"""A diagonal Gaussian over the weights of any network. With members, a mixture of them.

    .. math:: L = E_q\Big[-\frac{1}{B} \sum_i \log p(y_i | x_i, \omega)\Big]
        + \frac{1}{N} \big(E_q[-\log p(\omega)] - T H(q)\big)

    Complexity terms are sums over weights; at T = 1 they are the KL divergence. Weights that do not
    require gradients stay fixed.

    Args:
        network: gives the computation and the first means; it is copied, not changed.
        members: how many Gaussians, one for each mode that is found.
        **kwargs: of the method, see `lightning_bnn.methods.MFVI`, and of every module, see
            `Bayesian`.

    References:
        | Weight Uncertainty in Neural Networks (Blundell et al., 2015)
        | https://arxiv.org/abs/1505.05424

    >>> from lightning_bnn.models import mlp
    >>> module = MFVI(mlp(2, [8], 3), init_std=0.1)
    >>> deviations = module.posterior().sample(2000)["1.weight"].std(0)
    >>> bool(((deviations - 0.1).abs() < 0.02).all())
    True
    """

    mean: nn.Parameter
    log_std: nn.Parameter

    arguments = staticmethod(joint_arguments(methods.MFVI, Bayesian))

    def __init__(self, network: nn.Module, members: Numbers = 1, **kwargs: Any) -> None:
        super().__init__(network=network, members=members, **self.arguments(**kwargs))


class MILE(Bayesian):
    r"""Samples of the posterior by chains of constant speed, each from a trained network.

    .. math:: U(\omega) = -\sum_i \log p(y_i | x_i, \omega) - \log p(\omega)

    Every training step is one transition of `lightning_bnn.samplers.MCLMC`, of 21 gradients of all
    the data by default; what batch the loader gives at that step does not matter, its batch size
    says how many examples are computed at a time. The first 100 transitions descend by Adam, the
    next 200 adapt the steps. ``start_from`` starts from networks that were trained already; set
    ``descent_steps`` of the sampler to 0 then.

    No test corrects the law of the draws: ``train/energy_variance`` says how far to trust it, and
    `HMC` confirms it. BatchNorm uses the statistics of the given network; dropout is refused.
    Several processes share the data.

    Args:
        network: gives the computation, and where the first chain starts.
        members: how many chains.
        optimizer: makes the sampler, given parameters.
        **kwargs: of the method, see `lightning_bnn.methods.MILE`, and of every module, see
            `Bayesian`.

    References:
        | Microcanonical Langevin Ensembles: Advancing the Sampling of Bayesian Neural Networks
        | (Sommer et al., 2025), https://arxiv.org/abs/2502.06335

    >>> from functools import partial
    >>> from lightning import Trainer
    >>> from lightning_bnn import samplers
    >>> from lightning_bnn.datamodules import NoisySine
    >>> from lightning_bnn.likelihoods import Gaussian
    >>> from lightning_bnn.models import mlp
    >>> sampler = partial(samplers.MCLMC, steps=2, descent_steps=1, adapt_steps=2)
    >>> module = MILE(mlp(1, [4], 1), 2, optimizer=sampler, burn_in=3, likelihood=Gaussian())
    >>> quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    >>> trainer = Trainer(max_epochs=5, enable_model_summary=False, **quiet)
    >>> trainer.fit(module, NoisySine(batch_size=40))
    >>> module.posterior().size  # of two chains, after the fourth and the fifth transition
    4
    """

    networks: nn.Module
    samples: KeptNetworks

    arguments = staticmethod(joint_arguments(methods.MILE, Bayesian, optimizer=samplers.MCLMC))

    def __init__(self, network: nn.Module, members: Numbers = 4, **kwargs: Any) -> None:
        super().__init__(network=network, members=members, **self.arguments(**kwargs))


class SGHMC(Bayesian):
    r"""Samples of the posterior by any sampler of `lightning_bnn.samplers`.

    .. math:: \exp\big(-(N \cdot \mathrm{NLL}(\omega) - \log p(\omega)) / T\big)

    The sampler is the ``optimizer``: `SGHMC` by default, or `SGLD`, `PreconditionedSGLD`. It is
    told N and the prior. With `CyclicalSchedule` networks are kept in the sampling parts of its
    cycles only. Members are chains that start from networks of their own.

    Args:
        network: gives the computation, and where the first chain starts.
        members: how many chains.
        optimizer: makes the sampler, given parameters.
        **kwargs: of the method, see `lightning_bnn.methods.SGMCMC`, and of every module, see
            `Bayesian`.

    References:
        | Stochastic Gradient Hamiltonian Monte Carlo (Chen et al., 2014)
        | https://arxiv.org/abs/1402.4102

    >>> from lightning import Trainer
    >>> from lightning_bnn.datamodules import NoisySine
    >>> from lightning_bnn.likelihoods import Gaussian
    >>> from lightning_bnn.models import mlp
    >>> module = SGHMC(mlp(1, [4], 1), members=2, burn_in=1, likelihood=Gaussian())
    >>> quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    >>> trainer = Trainer(max_epochs=4, enable_model_summary=False, **quiet)
    >>> trainer.fit(module, NoisySine())
    >>> module.posterior().size  # of two chains, after the second, third and fourth epoch
    6
    """

    networks: nn.Module
    samples: KeptNetworks

    arguments = staticmethod(joint_arguments(methods.SGMCMC, Bayesian, optimizer=samplers.SGHMC))

    def __init__(self, network: nn.Module, members: Numbers = 1, **kwargs: Any) -> None:
        super().__init__(network=network, members=members, **self.arguments(**kwargs))


class SMILE(Bayesian):
    r"""Samples of the posterior by chains of constant speed, with gradients of minibatches.

    .. math:: \exp\big(-(N \cdot \mathrm{NLL}(\omega) - \log p(\omega)) / T\big)

    The ``optimizer`` is `lightning_bnn.samplers.SMILE`: the first 1000 steps descend by Adam, and
    the next 1000 tune the steps by the noise of gradients and by energy errors. Networks are kept
    after that. `MILE` does the same with all data in every gradient. ``start_from`` starts from
    networks that were trained already; set ``descent_steps`` of the sampler to 0 then.

    Args:
        network: gives the computation, and where the first chain starts.
        members: how many chains.
        optimizer: makes the sampler, given parameters.
        **kwargs: of the method, see `lightning_bnn.methods.SMILE`, and of every module, see
            `Bayesian`.

    References:
        | Can Microcanonical Langevin Dynamics Leverage Mini-Batch Gradient Noise?
        | (Sommer et al., 2026), https://arxiv.org/abs/2602.06500

    >>> from functools import partial
    >>> from lightning import Trainer
    >>> from lightning_bnn import samplers
    >>> from lightning_bnn.datamodules import NoisySine
    >>> from lightning_bnn.likelihoods import Gaussian
    >>> from lightning_bnn.models import mlp
    >>> sampler = partial(samplers.SMILE, descent_steps=2, adapt_steps=2)
    >>> module = SMILE(mlp(1, [4], 1), members=2, optimizer=sampler, likelihood=Gaussian())
    >>> quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    >>> trainer = Trainer(max_epochs=4, enable_model_summary=False, **quiet)
    >>> trainer.fit(module, NoisySine(batch_size=20))  # two steps an epoch
    >>> module.posterior().size  # of two chains, after the third and the fourth epoch
    4
    """

    networks: nn.Module
    samples: KeptNetworks

    arguments = staticmethod(joint_arguments(methods.SMILE, Bayesian, optimizer=samplers.SMILE))

    def __init__(self, network: nn.Module, members: Numbers = 4, **kwargs: Any) -> None:
        super().__init__(network=network, members=members, **self.arguments(**kwargs))


class SWAG(Bayesian):
    r"""Mean, variances and last deviations of the weights along a run.

    .. math:: \omega = \bar\omega + \sqrt{s} \Big(\tfrac{1}{\sqrt 2} \sigma \odot z_1
        + \tfrac{1}{\sqrt{2 (K - 1)}} D z_2\Big)

    One :math:`z_2` moves all tensors; K is the number of deviations that are there; they are from
    the final mean. With members, a mixture of as many runs. While it trains, validation judges the
    members as they are; afterwards networks are drawn, and get BatchNorm statistics of their own
    from one pass over the training data.

    Args:
        network: gives the computation; it is copied, not changed.
        members: how many runs.
        **kwargs: of the method, see `lightning_bnn.methods.SWAG`, and of every module, see
            `Bayesian`.

    References:
        | A Simple Baseline for Bayesian Uncertainty in Deep Learning (Maddox et al., 2019)
        | https://arxiv.org/abs/1902.02476

    >>> from lightning import Trainer
    >>> from lightning_bnn.datamodules import NoisySine
    >>> from lightning_bnn.likelihoods import Gaussian
    >>> from lightning_bnn.models import mlp
    >>> module = SWAG(mlp(1, [4], 1), start=2, likelihood=Gaussian())
    >>> quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    >>> trainer = Trainer(max_epochs=6, enable_model_summary=False, **quiet)
    >>> trainer.fit(module, NoisySine())
    >>> module.posterior().deviations.shape  # after the last four epochs, of 13 weights
    torch.Size([4, 13])
    """

    networks: nn.Module
    collected: Tensor
    last: NetworksInMemory

    arguments = staticmethod(joint_arguments(methods.SWAG, Bayesian))

    def __init__(self, network: nn.Module, members: Numbers = 1, **kwargs: Any) -> None:
        super().__init__(network=network, members=members, **self.arguments(**kwargs))
        if self.method.swa_lr is not None and self.lr_interval == "step":
            raise ValueError("`swa_lr` needs `lr_interval='epoch'`: its ramp counts epochs.")


class SymmetrizedVI(Bayesian):
    r"""Mean-field VI whose posterior is the mixture of all permuted copies of the Gaussian.

    .. math:: L^G = L_{MFVI} - \frac{T}{N} I(g; \omega), \quad I = H(q^G) - H(q)

    Predictions are those of the Gaussian. What changes is the objective: it no longer pays to sit
    between modes that are permutations of each other.

    Args:
        network: gives the computation and the first means; it is copied, not changed.
        members: how many Gaussians, one for each mode that is found.
        **kwargs: of the method, see `lightning_bnn.methods.SymmetrizedVI`, and of every module, see
            `Bayesian`.

    References:
        | Variational Inference Failures Under Model Symmetries (Gelberg et al., 2024)
        | https://arxiv.org/abs/2408.05496

    >>> import math
    >>> import torch
    >>> from lightning_bnn.models import mlp
    >>> module = SymmetrizedVI(mlp(2, [8], 3), num_data=100)
    >>> terms = module.losses((torch.randn(5, 2),), torch.tensor([0, 1, 2, 0, 1]))
    >>> information = terms["permutation_info"].item()  # copies of narrow Gaussians do not overlap
    >>> math.isclose(information, math.log(math.factorial(8)), rel_tol=1e-3)
    True
    """

    mean: nn.Parameter
    log_std: nn.Parameter

    arguments = staticmethod(joint_arguments(methods.SymmetrizedVI, Bayesian))

    def __init__(self, network: nn.Module, members: Numbers = 1, **kwargs: Any) -> None:
        super().__init__(network=network, members=members, **self.arguments(**kwargs))

    @property
    def symmetries(self) -> Symmetries:
        """The symmetries of the network. An example of the inputs must be known."""
        return self.method.units(self.state, self.run).symmetries

    def bracket(self, samples: int = 8) -> dict[str, Tensor]:
        """Lower and upper bound of the information, and interpolation, means over members."""
        with self.randomness("bracket"):
            return self.method.bracket(self.state, self.run, samples)

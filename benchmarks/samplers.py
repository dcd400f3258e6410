"""Samplers next to peers.

python benchmarks/samplers.py steps [--batch 128] [--threads 1]
    a step next to SGD, for a perceptron 784-512-512-10
python benchmarks/samplers.py chains [--repeats 3]
    chains with all the data, next to blackjax: effective draws of what a perceptron with ten tanh
    units predicts for yachts

All contestants begin in the same place, in turns. The peers are installed by `make bench`; those
that are not there are left out.
"""

import os
import warnings
from functools import partial

import lightning as L
import torch
from record import Record, parsed, parser
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from turns import present, stepper, taking_turns, timed
from vi import density_of_posteriors

from lightning_bnn import likelihoods, methods, models, samplers
from lightning_bnn import metrics as M
from lightning_bnn import params as P
from lightning_bnn.datamodules import Yacht
from lightning_bnn.modules import HMC

warnings.filterwarnings("ignore")
QUIET = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)
N, RATE = 60_000, 1e-3
CHAINS, LEAPFROGS, DRAWS, STD, TUNING = 4, 30, 150, 0.3, 10_000


def network():
    return models.mlp(784, [512, 512], 10)


# ------------------------------------------------------------ optimizers
def sgd(parameters):
    return torch.optim.SGD(parameters, RATE, momentum=0.9, weight_decay=1 / N, foreach=True)


def ours(name, **settings):
    kind = getattr(samplers, name)
    return lambda parameters: kind(parameters, lr=RATE, num_data=N, prior_precision=1.0, **settings)


def theirs(name):
    def make(parameters):
        import torch_uncertainty.optim

        return getattr(torch_uncertainty.optim, name)(parameters, lr=RATE)

    return make


def plain(make):
    """A step of an optimizer on a batch."""

    def made(x, y):
        net = network().to(x.device)
        step = stepper(lambda x, y: cross_entropy(net(x), y), net.parameters(), make)
        return lambda: step(x, y)

    return made


def posteriors(x, y):
    """The functional library: its whole step."""
    import posteriors as library

    net = network().to(x.device)
    density = density_of_posteriors(net)
    transform = library.sgmcmc.sghmc.build(density, lr=RATE, temperature=1 / N)
    box = [transform.init(dict(net.named_parameters()))]

    def step():
        box[0], _ = transform.update(box[0], (x, y), inplace=True)

    return step


def ivon(x, y):
    """Weights are drawn before every gradient."""
    net = network().to(x.device)
    optimizer = ours("IVON")(net.parameters())

    def step():
        optimizer.perturb()
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()

    return step


STEPS = {
    "SGD with momentum": plain(sgd),
    "Adam": plain(partial(torch.optim.Adam, lr=RATE)),
    "IVON": ivon,
    **{name: plain(ours(name)) for name in ("SGHMC", "SGLD")},
    "SMILE": plain(ours("SMILE", descent_steps=0, adapt_steps=0)),
    **{f"torch-uncertainty {name}": plain(theirs(name)) for name in ("SGHMC", "SGLD")},
    "posteriors SGHMC": posteriors,
}


# ------------------------------------------------------------ chains with all the data
def yachts():
    """Inputs and targets of training, and inputs of tests."""
    data = Yacht(batch_size=1000, test_share=0.2)
    data.prepare_data()
    data.setup("fit")
    data.setup("test")
    train, test = (next(iter(d)) for d in (data.train_dataloader(), data.test_dataloader()[0]))
    return train[0], train[1], test[0]


class OurChains:
    """A method in a bare loop. What it keeps are rows of weights."""

    def __init__(self, kind, problem, start, **options):
        self.network, x, y, self.test = problem
        method = {"HMC": methods.HamiltonianMonteCarlo, "MILE": methods.MILE}[kind]()
        run = methods.Run(self.network, likelihoods.Gaussian(std=STD), num_data=len(y))
        state = method.init(self.network, start)
        self.sampler, batch = method.sampler(state.parameters(), seed=0, **options), (x,)
        fit = methods.Fit(optimizer=self.sampler, batches=lambda: [methods.Batch(batch, y)])
        method.before_fit(state, fit, run)
        self.state, self.move = state, lambda: method.transition(state, run, self.sampler.step)
        self.each = 2 * options["steps"] if kind == "MILE" else LEAPFROGS + 1

    def sample(self, draws=DRAWS):
        kept = [(self.move(), self.sampler.rows())[1] for _ in range(draws)]
        return torch.stack(kept, 1), self.each * draws

    def predictions(self, rows):
        names, sizes = self.state.stack(), [t[0].numel() for t in self.state.stack().values()]
        pieces = zip(names.items(), rows.flatten(0, 1).split(sizes, 1), strict=True)
        stack = {n: piece.unflatten(1, t.shape[1:]) for (n, t), piece in pieces}
        return P.apply(self.network, stack, self.test)[..., 0].unflatten(0, rows.shape[:2])


def our_start(problem):
    """Four chains of HMC that have adapted their step size, and where they are."""
    stack = P.populate(problem[0], CHAINS)
    chains = OurChains("HMC", problem, stack, leapfrog_steps=LEAPFROGS, adapt_steps=130)
    chains.sample(300)
    return P.of(chains.state.networks), chains.sampler.step_size


def our_hmc(problem, start, size):
    return OurChains("HMC", problem, start, leapfrog_steps=LEAPFROGS, step_size=size)


def our_mile(problem, start, size):
    tuned = {"steps": 10, "step_size": 0.1, "descent_steps": 0, "adapt_steps": 200}
    chains = OurChains("MILE", problem, start, **tuned)
    chains.sample(200)
    return chains


class TrainedChains(OurChains):
    """The same chains in a Trainer, with some transitions in every step."""

    def __init__(self, transitions, problem, start, size):
        self.network, x, y, self.test = problem
        self.start, self.transitions, self.size = start, transitions, size
        self.loader = DataLoader(TensorDataset(x, y), len(y))

    def sample(self, draws=10 * DRAWS):
        module = HMC(
            self.network, members=CHAINS, every_n_steps=1, likelihood=likelihoods.Gaussian(std=STD),
            optimizer=partial(samplers.HMC, step_size=self.size, leapfrog_steps=LEAPFROGS),
            transitions=self.transitions,
        )  # fmt: skip
        self.state = module.state
        with torch.no_grad():
            for name, p in module.state.networks.named_parameters():
                p.copy_(self.start[name])
        steps = draws // self.transitions
        L.Trainer(max_steps=steps, max_epochs=-1, **QUIET).fit(module, self.loader)
        posterior = module.posterior()
        rows = torch.cat([posterior.networks[n].flatten(1) for n in self.state.stack()], 1)
        chains = torch.tensor(posterior.chains)
        kept = torch.stack([rows[chains == k] for k in range(CHAINS)])
        return kept, (LEAPFROGS + 1) * draws


class BlackjaxChains:
    """A kernel of blackjax, compiled as one loop over draws; each chain has its own tuning."""

    def __init__(self, kind, problem, start, size):
        os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
        import gpu_jax
        import jax
        from jax.flatten_util import ravel_pytree

        self.jax, self.kind, self.size = jax, kind, size
        network, *data = problem
        self.x, self.y, test = map(gpu_jax.array, data)
        starts = {n: gpu_jax.array(t) for n, t in start.items()}
        unravel = ravel_pytree({n: t[0] for n, t in starts.items()})[1]
        self.outputs = lambda vector, x: gpu_jax.forward(network, unravel(vector), x)
        self.predict = jax.jit(jax.vmap(jax.vmap(lambda vector: self.outputs(vector, test)[:, 0])))
        vectors = jax.vmap(lambda params: ravel_pytree(params)[0])(starts)
        keys = jax.random.split(jax.random.key(0), CHAINS)
        self.states, self.tunings = jax.jit(jax.vmap(self.tuned))(keys, vectors)
        self.many, self.key = jax.jit(self.chains, static_argnums=1), jax.random.key(1)

    def density(self, vector):
        away = self.outputs(vector, self.x) - self.y
        return -(away**2).sum() / (2 * STD**2) - (vector @ vector) / 2

    def kernel(self, tuning):
        import blackjax

        if self.kind == "HMC":
            return blackjax.hmc(self.density, **tuning, num_integration_steps=LEAPFROGS)
        return getattr(blackjax, self.kind)(self.density, **tuning)

    def tuned(self, key, vector):
        """Where a chain starts, and its tuning."""
        import blackjax

        if self.kind == "HMC":
            tuning = {"step_size": self.size, "inverse_mass_matrix": 1 + 0 * vector}
            return self.kernel(tuning).init(vector), tuning
        if self.kind == "mclmc":
            state = blackjax.mclmc.init(vector, self.density, key)
            state, found, _ = blackjax.mclmc_find_L_and_step_size(
                blackjax.mcmc.mclmc.build_kernel(), TUNING, state, key, self.density
            )
            return state, found._asdict()
        (state, found), _ = blackjax.window_adaptation(blackjax.nuts, self.density).run(
            key, vector, 300
        )
        return state, {name: found[name] for name in ("step_size", "inverse_mass_matrix")}

    def chains(self, key, draws):
        """Positions, and gradients of all chains."""
        jax = self.jax

        def of_one(state, tuning, key):
            def step(state, key):
                state, info = self.kernel(tuning).step(key, state)
                taken = 2 if self.kind == "mclmc" else info.num_integration_steps
                return state, (state.position, taken)

            return jax.lax.scan(step, state, jax.random.split(key, draws))

        return jax.vmap(of_one)(self.states, self.tunings, jax.random.split(key, CHAINS))

    def sample(self, draws=DRAWS):
        self.key, key = self.jax.random.split(self.key)
        draws *= 10 if self.kind == "mclmc" else 1
        states, (rows, taken) = self.jax.block_until_ready(self.many(key, draws))
        self.states = states
        return rows[:, :: 10 if self.kind == "mclmc" else 1], int(taken.sum()) / CHAINS

    def predictions(self, rows):
        return torch.from_numpy(self.jax.device_get(self.predict(rows)).copy())


def blackjax_of(kind):
    return lambda problem, start, size: BlackjaxChains(kind, problem, start, size)


SAMPLERS = {
    "HMC": our_hmc,
    "HMC in a Trainer": partial(TrainedChains, 1),
    "the same, transitions=10": partial(TrainedChains, 10),
    "MILE": our_mile,
    "blackjax HMC": blackjax_of("HMC"),
    "blackjax MCLMC": blackjax_of("mclmc"),
    "blackjax NUTS": blackjax_of("nuts"),
}


def chains(options, record):
    problem = (models.mlp(6, [10], 1, torch.nn.Tanh), *yachts())
    start, size = our_start(problem)
    calls = {
        name: partial(timed, partial(make, problem, start, size)) for name, make in SAMPLERS.items()
    }
    made = {}
    for name, (times, made[name]) in present(calls).items():
        record.value(name, times.seconds, what="CPU s of tuning")
    kept = {name: [] for name in made}
    turns = {name: lambda name=name: kept[name].append(made[name].sample()) for name in made}
    found = taking_turns(turns, options.repeats, warm=1)
    for name, rounds in kept.items():
        draws = torch.cat([made[name].predictions(rows) for rows, _ in rounds[1:]], 1)
        gradients, seconds = sum(taken for _, taken in rounds[1:]), sum(found[name].rounds)
        size = float(M.effective_sample_size(draws).median())
        record.value(name, 1e6 * seconds / gradients / CHAINS, what="us a gradient")
        record.value(name, 1000 * size / gradients / CHAINS, what="draws in 1000 gradients")
        record.value(name, size / seconds, what="draws a CPU second")


# ------------------------------------------------------------ steps
def steps(options, record):
    """Forward pass, backward pass and update."""
    x = torch.randn(options.batch, 784, device=options.device)
    y = torch.randint(10, (options.batch,), device=options.device)
    found = taking_turns(present(STEPS, x, y), options.repeats, options.device)
    record.times(found, network="mlp")


def main():
    made = parser(__doc__, ("steps", "chains"), repeats=30)
    made.add_argument("--batch", type=int, default=128)
    options = parsed(made)
    record = Record(options)
    {"steps": steps, "chains": chains}[options.part](options, record)
    record.write()


if __name__ == "__main__":
    main()

"""LightningModules as users write them, and a short way to train them."""

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from weightsym import params as P

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "log_every_n_steps": 1,
}


class Points(Dataset):
    """Fixed random inputs and classes, as a dict or a pair."""

    def __init__(self, n=36, as_dict=False):
        g = torch.Generator().manual_seed(0)
        self.x = torch.randn(n, 6, generator=g)
        self.y = torch.randint(3, (n,), generator=g)
        self.as_dict = as_dict

    def __len__(self):
        return len(self.x)

    def __getitem__(self, k):
        return {"x": self.x[k], "y": self.y[k]} if self.as_dict else (self.x[k], self.y[k])


def network(dropout=0.0):
    return nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3)
    )


class Attention(nn.Module):
    """Two heads of attention over three tokens, under names of BERT."""

    def __init__(self):
        super().__init__()
        self.self = nn.ModuleDict({n: nn.Linear(2, 6) for n in ("query", "key", "value")})
        self.dense = nn.Linear(6, 3)

    def forward(self, x):
        parts = self.self["query"], self.self["key"], self.self["value"]
        tokens = x.unflatten(-1, (3, 2))
        q, k, v = (part(tokens).unflatten(-1, (2, 3)).transpose(1, 2) for part in parts)
        mixed = (q @ k.mT).softmax(-1) @ v
        return self.dense(mixed.transpose(1, 2).flatten(2)).mean(1)


class Plain(L.LightningModule):
    """One submodule, pairs, automatic optimization."""

    def __init__(self, dropout=0.1):
        super().__init__()
        self.net = network(dropout)

    def training_step(self, batch, _):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch, _):
        self.log("val", self.training_step(batch, _))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


class Dict(Plain):
    """Dict batches; the network is called by keyword."""

    def training_step(self, batch, _):
        return F.cross_entropy(self.net(input=batch["x"]), batch["y"])


class Attributes(Plain):
    """Layers are attributes of the LightningModule, whose forward is the network."""

    def __init__(self):
        super().__init__()
        del self.net
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))

    def training_step(self, batch, _):
        return F.cross_entropy(self(batch[0]), batch[1])


class Rules(Plain):
    """The argument of the network has the name of an option of `discover`."""

    class Net(nn.Sequential):
        def forward(self, rules):
            return super().forward(rules)

    def __init__(self):
        super().__init__()
        self.net = self.Net(*self.net)

    def training_step(self, batch, _):
        return F.cross_entropy(self.net(rules=batch[0]), batch[1])


class Encoder(Plain):
    """An encoder and a head: which one is the network is known after the first step."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Linear(3, 3)

    def training_step(self, batch, _):
        return F.cross_entropy(self.scale(self.net(batch[0])), batch[1])


class Picky(Plain):
    """A forward that fails on two rows, and takes by name which rows it returns."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x, *, rows):
            return self.b(torch.relu(self.a(x)))[rows]

    def __init__(self):
        super().__init__()
        self.net = self.Net()

    def training_step(self, batch, _):
        rows = [0, 1, 2, 5]
        return F.cross_entropy(self.net(batch[0], rows=rows), batch[1][rows])


class TwoOptimizers(Plain):
    """Manual optimization, two steps per batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.scale = nn.Linear(1, 1)

    def training_step(self, batch, _):
        for optimizer in self.optimizers():
            loss = F.cross_entropy(self.net(batch[0]), batch[1]) + self.scale.weight.square().sum()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), 0.3), torch.optim.Adam(
            self.scale.parameters()
        )


class Compiled(Plain):
    """``torch.compile`` around the network; names get a prefix."""

    def __init__(self):
        super().__init__()
        self.net = torch.compile(self.net, backend="eager")


class CompiledInPlace(Plain):
    """``module.compile``; names stay."""

    def __init__(self):
        super().__init__()
        self.net.compile(backend="eager")


class Stacked(L.LightningModule):
    """Several networks side by side, as this package's own modules keep them."""

    def __init__(self, members=3):
        super().__init__()
        template = network()
        self.__dict__["template"] = template
        self.nets = P.stacked_copy(template, P.populate(template, members))

    def weights(self):
        return self.template, P.of(self.nets), (torch.randn(2, 6),)

    def training_step(self, batch, _):
        z = P.apply(self.template, dict(self.nets.named_parameters()), batch[0])
        return sum(F.cross_entropy(member, batch[1]) for member in z)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.3)


class Gan(L.LightningModule):
    """Two networks of one module, trained in turns."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 1))

    def training_step(self, batch, _):
        score = self.discriminator(self.generator(batch[0])).mean()
        self.log("score", score.detach())
        self.manual_backward(score)
        for optimizer, sign in zip(self.optimizers(), (1, -1), strict=True):
            optimizer.param_groups[0]["lr"] = 0.1 * sign
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self):
        return [torch.optim.SGD(m.parameters()) for m in (self.generator, self.discriminator)]


class Normed(Plain):
    """A norm over batches, and a buffer with infinite values."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5), nn.ReLU(),
            nn.Linear(5, 3),
        )  # fmt: skip
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.save_hyperparameters()


class Unreadable(Plain):
    """Control flow that depends on the data."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x):
            h = self.a(x)
            return self.b(torch.relu(h) if h.sum().item() > 0 else torch.tanh(h))

    def __init__(self):
        super().__init__()
        self.net = self.Net()


RUNS = {
    "plain": (Plain, {}),
    "uneven accumulation": (Plain, {"accumulate_grad_batches": 4}),
    "manual": (TwoOptimizers, {}),
    "bf16-mixed": (Plain, {"precision": "bf16-mixed"}),
    "bf16": (Plain, {"precision": "bf16-true"}),
    "64": (Plain, {"precision": "64-true"}),
    "compiled": (Compiled, {}),
    "compiled in place": (CompiledInPlace, {}),
    "dict batches": (Dict, {}),
    "layers as attributes": (Attributes, {}),
    "an argument named as an option": (Rules, {}),
    "an encoder and a head": (Encoder, {}),
    "a forward that fails on two rows": (Picky, {}),
    "no validation, no logger": (Plain, {"limit_val_batches": 0}),
}
"""Kinds of runs: a LightningModule and what its Trainer gets."""


class Recorder(L.Callback):
    """The weights of the network before training and after every batch that made a step."""

    def __init__(self, name="net"):
        self.name, self.weights, self.steps = name, [], []

    def _keep(self, trainer, module):
        network = module.get_submodule(self.name) if self.name else module
        network = getattr(network, "_orig_mod", network)
        params = module.weights()[1] if hasattr(module, "weights") else P.of(network)
        self.weights.append({k: v.clone() for k, v in params.items()})
        self.steps.append(trainer.global_step)

    def on_train_start(self, trainer, module):
        self._keep(trainer, module)

    def on_train_batch_end(self, trainer, module, *_):
        if trainer.global_step != self.steps[-1]:
            self._keep(trainer, module)


def fit(module, *callbacks, ckpt_path=None, data=None, batches=6, workers=0, **options):
    """Train on six batches of six, two epochs unless told otherwise."""
    L.seed_everything(1, verbose=False)
    points = Points(6 * batches, as_dict=isinstance(module, Dict))
    trainer = L.Trainer(**{**QUIET, "max_epochs": 2, "callbacks": list(callbacks), **options})
    data = data or DataLoader(points, batch_size=6, num_workers=workers)
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return trainer


def built(cls, *args):
    L.seed_everything(0, verbose=False)
    return cls(*args)

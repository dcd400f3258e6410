"""What part of a run changes no output, and how many parameters a network uses."""

# %% [markdown]
# # Along orbits, and off them
#
# Scales of hidden units move the weights along an *orbit*, on which no output changes. This page
# measures how much of a run on scikit-learn's digits is spent there, takes it out, and counts the
# parameters that the network uses where it ends.

# %%
import lightning as L
import torch
from torch.nn.functional import cross_entropy

from lightning_bnn.callbacks import LearningCoefficient, OrbitDrift
from lightning_bnn.datamodules import Digits
from lightning_bnn.models import mlp
from lightning_bnn.samplers import Horizontal
from lightning_bnn.symmetry import discover

torch.set_num_threads(1)
data = Digits(batch_size=128)


class Classifier(L.LightningModule):
    def __init__(self, horizontal):
        super().__init__()
        self.net, self.horizontal = mlp(64, [32], 10), horizontal

    def training_step(self, batch, batch_idx):
        return cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.net.parameters(), 0.01)
        if self.horizontal:
            Horizontal(optimizer, self.net, discover(self.net, torch.randn(2, 64)))
        return optimizer


# %% [markdown]
# `OrbitDrift` projects steps onto the orbit. `LearningCoefficient` lets four chains wander around
# the network, and says by how much their loss is higher: half of the number of parameters if the
# data determined each of them.

# %%
L.seed_everything(0, verbose=False)
for horizontal in (False, True):
    torch.manual_seed(0)
    module = Classifier(horizontal)
    drift = OrbitDrift(every_n_steps=1)
    complexity = LearningCoefficient(every_n_epochs=10, lr=0.1)
    trainer = L.Trainer(
        max_epochs=30,
        accelerator="cpu",
        logger=False,
        callbacks=[drift, complexity],
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    images, labels = data.splits.test
    right = module.net(data.normalise(images)).argmax(-1) == labels
    _, (_, along, chance) = drift.history[-1]
    print("off the orbit:" if horizontal else "Adam:")
    print(f"  {100 * along:.1f} % of the path along the orbit, {100 * chance:.1f} % by chance")
    print(f"  accuracy {100 * right.float().mean():.0f} %")
    for step, (value, error, *_) in complexity.history:
        print(f"  step {step}: coefficient {value:.1f} +- {error:.1f}")

# %% [markdown]
# Without the part along the orbit the network is as accurate. The coefficient is far below half of
# the 2410 parameters: the data determine few of them, and a Gaussian of precision 100, which holds
# the chains, the others. Compare it only between networks with the same precision and step size.
# [Symmetries](../symmetry.md#along-orbits-and-off-them) has the other tools.

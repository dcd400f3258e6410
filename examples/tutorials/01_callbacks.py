"""Five callbacks on a LightningModule of your own, and what their numbers say."""

# %% [markdown]
# # Callbacks on your run
#
# Callbacks look at the weights while they train, with any LightningModule. This page shows what
# four of them say, and what to conclude. The data are scikit-learn's digits; the learning rate
# falls to a twentieth after fifteen of twenty epochs.

# %%
import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
train, held_out = (TensorDataset(x[rows], y[rows]) for rows in order.split([1300, 497]))


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)
        )

    def training_step(self, batch, batch_idx):
        return cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        self.log("val_loss", cross_entropy(logits, batch[1]))
        self.log("val_accuracy", (logits.argmax(-1) == batch[1]).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [15], 0.05)]


# %% [markdown]
# With a TensorBoard logger, curves and figures would appear there; with this one, numbers go to
# `metrics.csv` and figures to PNG files.

# %%
from lightning_bnn.callbacks import (
    CheckpointHarvester,
    MassGap,
    PermutationTau,
    PosteriorFigures,
)

tau = PermutationTau()
gap = MassGap(every_n_steps=10)
harvester = CheckpointHarvester(every_n_epochs=1)
figures = PosteriorFigures(every_n_steps=5, draw_every=1000)

L.seed_everything(0, verbose=False)
trainer = L.Trainer(
    max_epochs=20,
    accelerator="cpu",
    logger=CSVLogger("runs"),
    log_every_n_steps=10,
    callbacks=[tau, gap, harvester, figures],
    enable_progress_bar=False,
    enable_model_summary=False,
)
module = Classifier()
trainer.fit(module, DataLoader(train, 50, shuffle=True), DataLoader(held_out, 500))

# %% [markdown]
# ## PermutationTau: have the units settled?
#
# A *unit* is a neuron with the weights that enter and leave it. Exchange two units of a layer, and
# the network computes what it did before. `PermutationTau` sorts the units of each layer by their
# largest incoming weight, and compares the order with that one step before, by Kendall's tau: **1
# means that no two units have changed places, 0 that half of all pairs have.** Each number is a
# mean over ten steps; an epoch has 26.

# %%
print("step", *tau.layers, sep="  ")
for step, layers in [*tau.history[:3], tau.history[36], tau.history[-1]]:
    print(f"{step:4d}", *(f"{value:8.3f}" for value in layers), sep="  ")

# %% [markdown]
# The order changes in the first steps, a little while the learning rate is high, and no more after
# it has dropped (step 390).
#
# - Where tau stays near 1, sorted networks of this run, and of other runs, may be compared weight
#   by weight. Before that, a sorted position belongs to another unit every few steps.
# - A tau that falls again late in a run says that training is still reordering the network: the
#   learning rate is too high, or the data have changed.
#
# ## MassGap: how much of the weight decay is for nothing?
#
# Multiply everything that enters a ReLU unit by 2, divide everything that leaves it by 2, and the
# function is the same, but not the sum of squared weights, the *mass*, that weight decay penalises.
# The callback computes the least mass over all such rescalings, and by how many per cent the
# network exceeds it.

# %%
print("step     mass  minimum  excess")
for step, (mass, minimum, excess) in [gap.history[k] for k in (0, 9, 38, -1)]:
    print(f"{step:4d}  {mass:7.1f}  {minimum:7.1f}  {excess:5.1f} %")

# %% [markdown]
# A few per cent are harmless. With a large or growing excess, weight decay acts on scales without
# influence on the function (`lightning_bnn.symmetry.min_mass` and `rescale` give you the network at
# the minimum).
#
# ## PosteriorFigures: the same run, with symmetries and without
#
# A few weights of the first layer, as they are (*raw*), with every unit scaled to norm one
# (*scaled*), and sorted as well (*sorted*):

# %%
import shutil
from pathlib import Path

folder = Path(trainer.log_dir)
print(*sorted(path.name for path in (folder / "figures").iterdir()), sep="\n")
shutil.copy(folder / "figures" / "posterior-trajectories-520.png", "trajectories.png")

# %% [markdown]
# On the left, weights grow. In the middle, the growth that was scale is gone. On the right a curve
# jumps when two units change places, and is calm after the learning rate has dropped. [How to read
# these pictures](../pictures.md) has good and bad runs side by side.
#
# ## CheckpointHarvester: the weights themselves
#
# The harvester has written the network after every epoch into a *bank*, a folder that can be read
# by row or by layer, also during the run.

# %%
from lightning_bnn import params
from lightning_bnn.bank import CheckpointBank

bank = CheckpointBank(folder / "bank", mode="r")
print(bank.rows, "networks;", sorted(bank.records[-1]), "are noted of each")
logits = params.apply(module.net, bank[10:15], held_out.tensors[0])  # five networks at once
single = (logits.argmax(-1) == held_out.tensors[1]).float().mean(1)
together = (logits.softmax(-1).mean(0).argmax(-1) == held_out.tensors[1]).float().mean()
print("accuracy of epochs 11 to 15:", *(f"{value:.3f}" for value in single))
print(f"of their mean prediction: {together:.3f}")

# %% [markdown]
# Networks of a bank can be averaged ([tutorial 4](04_symmetries.md)), compared, or turned into a
# posterior ([tutorial 3](03_comparing.md)). All options are in [callbacks](../callbacks.md).

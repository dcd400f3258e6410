"""Populations of thousands of small networks, banks, and what can be read from them."""

# %% [markdown]
# # Populations and banks
#
# This page trains five thousand small networks in a few seconds, and looks at their weights as a
# cloud, then five hundred larger ones, and at what they predict.
#
# ## Five thousand networks, one call
#
# `population` trains many independent networks side by side and stores them in a *bank*, a folder
# with one file of networks. It takes a configuration as `lightning-bnn fit` does, or the name of a
# preset, as does the command `lightning-bnn population`. `two_gaussians` is a network with two
# inputs, two hidden units and one output, which separates two classes of points in the plane.

# %%
import contextlib
import io

import torch

from lightning_bnn.bank import CheckpointBank
from lightning_bnn.commands.population import population

torch.set_num_threads(1)


def quietly(**settings):
    """Without its report, which says how many seconds it took."""
    with contextlib.redirect_stdout(io.StringIO()):
        population(**settings)


quietly(config="two_gaussians", members=5000, part=5000, bank="perceptrons")
bank = CheckpointBank("perceptrons", mode="r")
print(bank)
print("shapes:", {name: tuple(shape) for name, shape in bank.shapes.items()})
print("of the last network we know", {k: bank.records[-1][k] for k in ("member", "step", "epoch")})

# %% [markdown]
# ## Weights as a picture
#
# `bank[7]` and `bank[10:20]` are networks, `bank.layer(name)` is one tensor of all. Here are the
# two weights of the last layer, one point for each network, as a density.

# %%
from lightning_bnn.models import mlp
from lightning_bnn.plots import hexbin_figure
from lightning_bnn.symmetry import canonicalise, discover

network = mlp(2, [2], 1)
symmetries = discover(network, torch.randn(4, 2))
networks = bank[:]  # all of them, as one stack
scaled = canonicalise(networks, symmetries, "unit-norm", None, target=3.0)
sorted_too = canonicalise(scaled, symmetries, None, "outgoing", descending=False)
forms = {
    "as trained": networks["3.weight"][:, 0],
    "scaled": scaled["3.weight"][:, 0],
    "scaled and sorted": sorted_too["3.weight"][:, 0],
}
hexbin_figure(forms, ("weight 1", "weight 2"), diagonal=True, central=0.96).savefig(
    "weights_of_the_last_layer.png", dpi=100
)
print("share of networks whose first weight is the larger one:")
for text, pairs in forms.items():
    print(f"{text:18s} {(pairs[:, 0] > pairs[:, 1]).double().mean():.3f}")

# %% [markdown]
# On the left nearly all networks lie on a ring, which is symmetric about the dashed diagonal: units
# 1 and 2 can be exchanged, so every solution is there twice. In the middle, hidden units are scaled
# to the same norm: a part of the ring was scale. On the right they are sorted as well, and each
# solution is there once. With 16 units there would be 16! = 2 x 10^13 copies.
#
# ## A population of your own network
#
# Here a preset for the digits, with sixteen hidden units and five epochs:

# %%
changes = {
    "model.init_args.network.init_args.hidden": [16],
    "trainer.max_epochs": 5,
}
settings = {"config": "digits_ensemble", "bank": "digits", "change": changes}
quietly(members=400, **settings)
before = CheckpointBank("digits", mode="r")[7]
quietly(members=500, **settings)  # adds those that are missing
quietly(members=500, **settings)  # has nothing left to do
after = CheckpointBank("digits", mode="r")
same = all(torch.equal(tensor, after[7][name]) for name, tensor in before.items())
print(after, "- network 7 is what it was:", same)

# %% [markdown]
# The same call continues after a crash, and `--first` trains parts on other machines
# ([scale](../scale.md)).
#
# ## Predictions without holding them
#
# `stream_predictions` reads the bank block by block and keeps sums: how good each network is, what
# all say together, and how much each pair disagrees (`found.pairs`, *mutual information*, 0 for two
# networks that say the same, at most log 2 = 0.69).

# %%
from lightning_bnn.datamodules import Digits
from lightning_bnn.posteriors import stream_predictions

network = mlp(64, [16], 10)
data = Digits()
data.setup("test")
batches = list(data.prepared(data.test_dataloader()[0]))
found = stream_predictions(network, "digits", batches, pairs=True)
labels = torch.cat([targets for _, targets in batches])
low, middle, high = found.accuracy.quantile(torch.tensor([0.05, 0.5, 0.95]).double())
together = (found.mean.argmax(-1) == labels).double().mean()
print(f"accuracy of one network: {middle:.3f}, 90 % of them between {low:.3f} and {high:.3f}")
print(
    f"of all together: {together:.3f}; better than it: {(found.accuracy > together).sum()} of 500"
)

# %% [markdown]
# The mean of all is at the upper end. The few networks above it may be lucky on 450 digits.
#
# ## How many networks are worth averaging?
#
# Form groups of 1, 2, 5, ... networks, and test the mean prediction of each (NLL, lower is better):

# %%
from matplotlib.figure import Figure

from lightning_bnn import params

x, y = batches[0]
with CheckpointBank("digits", mode="r") as bank:
    probs = params.apply(network, bank[:], x).softmax(-1)
sizes = (1, 2, 5, 10, 20, 50)
curve = []
for size in sizes:
    groups = probs.unflatten(0, (-1, size)).mean(1)
    nll = -groups[:, range(len(y)), y].log().mean(1)
    curve.append((nll.mean(), nll.std()))
    print(f"{size:3d} networks: NLL {nll.mean():.4f}, from group to group ± {nll.std():.4f}")

figure = Figure(figsize=(5, 3.4), layout="constrained")
ax = figure.subplots()
means, deviations = torch.tensor(curve).T
ax.errorbar(sizes, means, yerr=deviations, marker="o", capsize=3)
ax.set_xscale("log", base=2)
ax.set_xticks(sizes, sizes)
ax.set(xlabel="networks that are averaged", ylabel="NLL, mean ± deviation")
figure.savefig("groups_of_networks.png", dpi=100)

# %% [markdown]
# Hardly any gain is left from twenty networks on. With five, the result still depends on which
# five.
#
# A bank is a posterior for all other tools ([tutorial 3](03_comparing.md)).

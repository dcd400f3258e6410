"""Comparing posteriors, with a folder of plain .pt files."""

# %% [markdown]
# # Comparing posteriors, with a folder of plain .pt files
#
# You have trained the same network several times, into a folder of `torch.save` files. Do two
# recipes lead to the same networks? And are these like draws of the posterior?
#
# A plain PyTorch loop fills some folders, with perceptrons of 16 hidden units on scikit-learn's
# digits. The weight decay is one divided by the number of examples, as for a standard normal prior.

# %%
from pathlib import Path

import torch

from lightning_bnn.datamodules import Digits
from lightning_bnn.models import mlp

torch.set_num_threads(1)
data = Digits(batch_size=270)
data.setup("fit")
batches = list(data.prepared(data.train_dataloader()))
examples = sum(len(targets) for _, targets in batches)


def trained(seed, epochs):
    torch.manual_seed(seed)
    network = mlp(64, [16], 10)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01, weight_decay=1 / examples)
    for _ in range(epochs):
        for inputs, targets in batches:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(network(inputs), targets).backward()
            optimizer.step()
    return network


def save(folder, seeds, epochs):
    Path(folder).mkdir(exist_ok=True)
    for seed in seeds:
        torch.save(trained(seed, epochs).state_dict(), f"{folder}/{seed}.pt")


save("ours", range(16), epochs=25)
save("again", range(20, 28), epochs=25)  # the same recipe from other seeds
save("short", range(28, 36), epochs=8)  # another recipe
for folder in ("ours", "again", "short"):
    print(f"{folder:6s}", len(list(Path(folder).rglob("*.pt"))), "files")

# %% [markdown]
# ## A folder as a posterior
#
# `FromCheckpoints` makes a module of a folder, without training, and finds the names of the network
# behind any prefix (`model.`, `net.`, ...). Nothing in the files is executed.

# %%
import lightning as L

from lightning_bnn.modules import FromCheckpoints, results_table

network = mlp(64, [16], 10)
posterior = FromCheckpoints(network, "ours")
trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
trainer.test(posterior, data, verbose=False)
wanted = ("test/acc", "test/nll", "test/ece", "test/scrambled/AUROC")
print(results_table({name: trainer.callback_metrics[name] for name in wanted}))

# %% [markdown]
# ## How far apart are two sets of networks?
#
# *MMD²* (maximum mean discrepancy, squared) measures how different two distributions are: near 0
# for the same one, at most 2; the estimate may be negative by chance. Neighbours of one network,
# and the same with their hidden units in another order, show why weights alone mislead:

# %%
from lightning_bnn.metrics import mmd
from lightning_bnn.symmetry import canonicalise, discover, permute, random_permutations

symmetries = discover(network, torch.zeros(2, 1, 8, 8))
one = {name: tensor[0] for name, tensor in posterior.posterior().networks.items()}
noise = torch.Generator().manual_seed(0)
near, also_near = (
    {n: t + 0.01 * torch.randn(20, *t.shape, generator=noise) for n, t in one.items()}
    for _ in range(2)
)
reordered = permute(also_near, symmetries, random_permutations(symmetries, noise))
for text, other in (("same order", also_near), ("another order", reordered)):
    raw = mmd(near, other)
    removed = mmd(canonicalise(near, symmetries), canonicalise(other, symmetries))
    print(f"{text:14s} MMD² of weights {raw:6.3f}, without symmetries {removed:6.3f}")

# %% [markdown]
# `canonicalise` brings every network into a standard order at standard scales.
#
# ## All folders in one table
#
# `compare` takes a reference, and posteriors by name. (In a shell: `lightning-bnn compare`.)

# %%
import csv

import lightning_bnn

places = {"Again": "again", "Short": "short"}
result = lightning_bnn.compare("ours", places, data, network=network, reference_is="trained")


def show(table, columns):
    """Some columns of a table, as means and errors."""
    print(" " * 35, *(f"{column:>14s}" for column in columns))
    for row in csv.DictReader(table.splitlines()):
        pairs = [(row[column], row[f"{column} (error)"]) for column in columns]
        shown = [f"{float(v):.2f} ± {float(e):.2f}" if v else "" for v, e in pairs]
        name = " ".join(row[key] for key in ("mode", "method", "posterior") if key in row)
        name += f", {row['networks']} networks" if "networks" in row else ""
        print(f"{name:35s}", *(f"{text:>14s}" for text in shown))


show(result.tables["distances"].csv(), ("law", "NS law", "TV"))
print()
show(result.tables["predictions"].csv(), ("Acc", "NLL", "FPR95"))
result.figures["metrics"].savefig("distances_and_predictions.png", dpi=150)

# %% [markdown]
# - *law* is MMD² x 100 between the distributions over networks that recipes lead to; *NS* ("no
#   symmetries") compares canonical forms.
# - A *mode* was found independently of the rest, here a file. "One mode" takes each alone, "Multi
#   mode" all together.
# - *TV* is by how much the mean predictions differ from ours, in per cent of probability; *FPR95*
#   the share of digits that raise a false alarm when 95 % of the scrambled images are found.
# - *Noise of the reference* compares parts of our folder with each other.
#
# **Again** cannot be told from our folder: zero is within about two errors. **Short** can: its law
# is about three errors away from zero, and its predictions differ by more than a tenth of the
# probability.
#
# ## Is this the posterior?
#
# Training goes to a maximum of the posterior, and most of the posterior lies elsewhere. For a few
# small networks there are *references*: draws by long chains of Hamiltonian Monte Carlo, `gold` if
# all chains agree. One has our network, our data and our prior. We also train a sampler, `SGHMC`,
# which keeps moving through the posterior.

# %%
import contextlib
import io
from functools import partial

from lightning_bnn import params, samplers
from lightning_bnn.commands.fidelity import fidelity
from lightning_bnn.modules import SGHMC
from lightning_bnn.references import read_reference

draws, _, card = read_reference("digits")
print(f"{card.verdict}: {card.about}; {params.stack_size(draws.networks())} networks")

steps = partial(samplers.SGHMC, lr=0.1, momentum=0.9)
chains = SGHMC(network, members=4, prior_std=1.0, burn_in=40, optimizer=steps)
quiet = {"enable_progress_bar": False, "enable_model_summary": False}
trainer = L.Trainer(
    max_epochs=100, accelerator="cpu", logger=False, enable_checkpointing=False, **quiet
)
trainer.fit(chains, data)
trainer.save_checkpoint("chains.ckpt")

with contextlib.redirect_stdout(io.StringIO()):
    fidelity("digits", {"Ours": "ours", "Chains": "chains.ckpt"}, samples=40, out="scored")
show(Path("scored/fidelity.csv").read_text(), ("function law", "NS law", "TV", "Acc", "NLL"))

# %% [markdown]
# *Function law* is the distance between what networks predict. As functions the chains cannot be
# told from the reference, and without symmetries their weights are much closer than ours. In the
# mean prediction our folder is as near to the reference as the chains (TV), and as accurate, within
# about two errors.
#
# So use trained networks for averaged predictions, and a sampler to know what the data leave open.
# [The leaderboard](../results/leaderboard.md) scores every method in this way, and [comparing
# posteriors](../studies.md) explains every column.

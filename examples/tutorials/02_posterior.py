"""A posterior for your network, and what its uncertainty is good for."""

# %% [markdown]
# # A posterior for your network, and what its uncertainty is good for
#
# Many sets of weights explain the training data about equally well, and they disagree where the
# data say little. The *posterior* is the distribution over all of them, given the data. This page
# approximates it in three ways, each a LightningModule for any `nn.Module`, and uses it:
#
# - `DeepEnsemble`: several networks from different starts;
# - `SWAG`: a Gaussian around the weights that a run visits late;
# - `SymmetrizedVI`: a Gaussian with its own width for every weight, found by optimisation
#   (*variational inference*), for which all orders of the units count as the same network.
#
# The data are scikit-learn's digits, with three sets that are not digits any more, and two of poor
# quality.

# %%
from functools import partial

import lightning as L
import torch

from lightning_bnn.datamodules import Digits
from lightning_bnn.models import mlp
from lightning_bnn.modules import SWAG, DeepEnsemble, SymmetrizedVI

torch.set_num_threads(1)
L.seed_everything(0, verbose=False)
data = Digits(batch_size=128, val_share=0.3)
network = mlp(64, [32], 10)


def fit(module, epochs):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False, **quiet
    )
    trainer.fit(module, data)
    return module


adam = partial(torch.optim.Adam, lr=0.02)
single = fit(DeepEnsemble(network, members=1, optimizer=adam), 20)  # ordinary training
ensemble = fit(DeepEnsemble(network, members=5, optimizer=adam), 20)
sgd = partial(torch.optim.SGD, lr=0.2, momentum=0.9)
swag = fit(SWAG(network, members=5, start=12, optimizer=sgd), 24)
faster = partial(torch.optim.Adam, lr=0.03)
gaussian = fit(SymmetrizedVI(network, prior_std=0.5, every=8, optimizer=faster), 60)
posteriors = {"one network": single, "ensemble": ensemble, "SWAG": swag, "VI": gaussian}

# %% [markdown]
# ## Predictions
#
# `module(x)` is the mean prediction of the posterior, here probabilities of ten classes;
# `module.outputs((x,))` are the outputs of every network drawn. *NLL*, the negative log-likelihood,
# punishes confident errors (lower is better); *ECE* is by how much confidence and accuracy differ
# (0 is perfect).

# %%
from lightning_bnn.metrics import ece, nll

data.setup("test")
loaders = zip(data.test_sets, data.test_dataloader(), strict=True)
sets = {name: next(iter(data.prepared(loader))) for (name, kind), loader in loaders}
x, y = sets["test"]
print(f"{'':12s} networks  accuracy    NLL    ECE")
for name, module in posteriors.items():
    with torch.no_grad():
        networks = len(module.outputs((x,)))
    probs = module(x)
    accuracy = (probs.argmax(-1) == y).float().mean()
    print(f"{name:12s} {networks:8d}  {accuracy:8.3f}  {nll(probs, y):5.3f}  {ece(probs, y):5.3f}")

# %% [markdown]
# With 450 test digits, one per cent of accuracy means nothing. VI is the least confident of the
# four, which costs it NLL and ECE.
#
# ## Two kinds of uncertainty
#
# A prediction can be uncertain for two reasons. Either every network is torn between two classes
# (the image is ambiguous), or the networks contradict each other (the training data have nothing
# like it). The second part is the *mutual information* between prediction and weights.

# %%
from lightning_bnn.metrics import decompose_uncertainty


@torch.no_grad()
def sampled(module, inputs):
    return module.outputs((inputs,)).softmax(-1)  # (networks, examples, classes)


print("mean over the set, in nats:      total = in each network + between networks")
for name in ("ensemble", "VI"):
    for which in ("test", "noisy", "noise"):
        parts = decompose_uncertainty(sampled(posteriors[name], sets[which][0]))
        total, inside, between = (part.mean() for part in parts)
        print(f"{name:9s} {which:22s} {total:5.2f} = {inside:15.2f} + {between:16.2f}")

# %% [markdown]
# Both parts grow from clean digits to noise. More data of that kind only reduce the second. Which
# digits does the ensemble find hard?

# %%
from matplotlib.figure import Figure

from lightning_bnn.metrics import mutual_information

information = mutual_information(sampled(ensemble, x))
order = information.argsort(descending=True)
figure = Figure(figsize=(9, 2.6), layout="constrained")
for k, ax in enumerate(figure.subplots(2, 8).ravel()):
    row = order[k] if k < 8 else order[-1 - (k - 8)]
    said = sampled(ensemble, x[row : row + 1]).argmax(-1).flatten().tolist()
    ax.imshow(x[row, 0], cmap="gray_r")
    ax.set_title(f"{y[row]}: " + "".join(map(str, said)), fontsize=9)
    ax.set_axis_off()
figure.savefig("uncertain_and_certain_digits.png", dpi=100)
wrong = (ensemble(x).argmax(-1) != y)[order]
print(f"errors among the 45 most uncertain digits: {wrong[:45].sum()}")
print(f"errors among the 405 others: {wrong[45:].sum()}")

# %% [markdown]
# Above, the eight digits on which the networks disagree most, below those on which they disagree
# least, with the label and what the five networks say. The tenth with the most disagreement has
# twice as many errors as all others together.
#
# ## Notice inputs that are not digits
#
# To notice inputs of another kind (*out of distribution*, OOD), give each a score, and raise an
# alarm above a threshold. *AUROC* is the probability that an OOD input has a higher score than a
# digit: 1 is perfect, 0.5 a coin. One network can only score by its lack of confidence; a posterior
# also by mutual information.

# %%
from lightning_bnn.metrics import auroc, max_probability_score, mutual_information_score
from lightning_bnn.plots import histograms_figure


def detection(module, score, which):
    probs = [sampled(module, sets[name][0]) for name in ("test", which)]
    scores = [score(p if score is mutual_information_score else p.mean(0)) for p in probs]
    is_ood = torch.cat([torch.full((len(s),), k) for k, s in enumerate(scores)]).bool()
    return auroc(torch.cat(scores), is_ood)


print(f"AUROC                       {'scrambled':>9s}  {'inverted':>9s}  {'noise':>9s}")
for name, module in posteriors.items():
    for text, score in (
        ("confidence", max_probability_score),
        ("information", mutual_information_score),
    ):
        if name != "one network" or text == "confidence":
            found = [detection(module, score, s) for s in ("scrambled", "inverted", "noise")]
            print(f"{name:12s}  by {text:11s}", "  ".join(f"{value:9.3f}" for value in found))
panels = {
    name: {
        s: mutual_information(sampled(module, sets[s][0])) for s in ("test", "scrambled", "noise")
    }
    for name, module in (("ensemble", ensemble), ("VI", gaussian))
}
histograms_figure(panels, "mutual information", 30).savefig("mutual_information.png", dpi=100)

# %% [markdown]
# Mutual information beats confidence in every pair of rows, and the ensemble and VI beat one
# network by much. SWAG is worse than one network, which its accuracy and NLL do not show.
#
# ## Probabilities that mean what they say
#
# A posterior that says 90 % should be right nine times out of ten. One number corrects it: the
# *temperature*, by which logits are divided. Every module finds it on half of the validation data.
# The other half makes *conformal sets*: for each input a set of classes that holds the truth in 90
# % of all cases, however good the network.

# %%
rows = torch.arange(len(y))
print(f"{'':12s} temperature   NLL before  after   set size  holds the truth")
for name, module in posteriors.items():
    calibration = module.calibrate(data, alpha=0.1)
    before, after = nll(module(x), y), nll(calibration.probs(x), y)
    found = calibration.sets(x)
    size, coverage = found.sum(-1).float().mean(), found[rows, y].float().mean()
    print(
        f"{name:12s} {calibration.calibrator.value:11.2f}   {before:10.3f}  {after:5.3f}"
        f"   {size:8.2f}  {coverage:15.3f}"
    )
calibration.figure().savefig("reliability_of_VI_on_validation_data.png", dpi=90)

# %% [markdown]
# Three of the four were slightly too sure, and gain little. VI was far from sure enough, and gains
# a quarter of its NLL: calibrate it. The sets hold the truth about as often as promised, with less
# than one class on average, since some are empty.
#
# `calibration.save("calibration.pt")` keeps it ([calibration](../calibration.md)).
#
# ## Which one?
#
# Start with `DeepEnsemble(members=5)`: it is at or near the top of every table here. [Which
# method?](../which_method.md) compares all of them.

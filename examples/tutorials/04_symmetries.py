"""Finding, removing and matching symmetries, up to a transformer."""

# %% [markdown]
# # Finding, removing and matching symmetries, up to a transformer
#
# A *symmetry* of a network is a change of its weights that changes none of its outputs. Without
# symmetries, networks that were trained apart can be averaged, compared, and joined by a line on
# which the loss stays low. This page does so with perceptrons and transformers on scikit-learn's
# digits.

# %%
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lightning_bnn import params
from lightning_bnn.datamodules import Digits
from lightning_bnn.models import mlp

torch.set_num_threads(1)
data = Digits(batch_size=128)
data.setup("fit")
data.setup("test")
batches = list(data.prepared(data.train_dataloader()))
x, y = next(iter(data.prepared(data.test_dataloader()[0])))


def trained(make, seed, epochs):
    torch.manual_seed(seed)
    network = make()
    optimizer = torch.optim.AdamW(network.parameters(), 0.01, weight_decay=0.1)
    total = epochs * len(batches)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total)
    for _ in range(epochs):
        for inputs, targets in batches:
            optimizer.zero_grad()
            cross_entropy(network(inputs), targets).backward()
            optimizer.step()
            schedule.step()
    return network.eval()


def accuracy(network, weights=None):
    weights = params.of(network) if weights is None else weights
    return (params.apply(network, weights, x).argmax(-1) == y).float().mean()


# %% [markdown]
# ## A perceptron: find
#
# `discover` reads the graph of any network, with an example of its inputs. Weights are dicts from
# names to tensors (`params.of(network)`); several networks are one such dict, with one more
# dimension in front.

# %%
from lightning_bnn.symmetry import discover, verify

networks = [trained(lambda: mlp(64, [32, 32], 10), seed, epochs=30) for seed in range(6)]
network = networks[0]
symmetries = discover(network, x[:2])
print(symmetries)
error = verify(network, symmetries, x)
print("outputs change by less than a millionth:", bool(error < 1e-6))

# %% [markdown]
# Two groups of 32 *units* (neurons with all weights that enter and leave them) may be exchanged
# (*permutation*), and each unit may be multiplied by a positive number before its ReLU and divided
# by it afterwards (*scaling*). So more than 10^70 places in weight space have this very function.
# `verify` tries random ones. What `discover` does not understand is listed in `symmetries.frozen`.
#
# ## Remove
#
# Of all these copies `canonicalise` always picks the same one: units scaled to norm one and sorted.

# %%
from lightning_bnn.symmetry import (
    canonicalise,
    permute,
    random_permutations,
    random_scales,
    rescale,
)

generator = torch.Generator().manual_seed(0)
weights = params.of(network)
disguised = permute(weights, symmetries, random_permutations(symmetries, generator))
disguised = rescale(disguised, symmetries, random_scales(symmetries, generator))


def distance(a, b):
    return sum(float((a[name] - b[name]).square().sum()) for name in a) ** 0.5


forms = [canonicalise(w, symmetries) for w in (weights, disguised)]
print(f"distance as stored {distance(weights, disguised):.2f}, canonical {distance(*forms):.2f}")

# %% [markdown]
# ## Match
#
# No symmetry makes networks from other seeds equal, but `match` finds the order of the units in
# which they are *closest*. The *barrier* is how far the loss rises on the straight line between two
# networks, above the mean of both ends.

# %%
from lightning_bnn.symmetry import align, barrier, match

first, second = params.of(networks[0]), params.of(networks[1])
matching = match(first, second, symmetries)
moved = matching.element(first)
lines = {}
for text, start in (("as trained", first), ("matched", moved)):
    between = barrier(network, start, second, batches)
    lines[text] = between
    print(f"{text:10s}  distance {distance(start, second):5.2f}  barrier {between.height:5.3f}")
panels = {"two perceptrons": lines}

# %% [markdown]
# `align` does this for many networks at once. Take the mean of the weights of all six:

# %%
stack = params.stack([params.of(one) for one in networks])
alignment = align(stack, symmetries)
print("accuracy of each:", *(f"{accuracy(one):.3f}" for one in networks))
for text, six in (("as trained", stack), ("aligned", alignment.element(stack))):
    mean = {name: tensor.mean(0) for name, tensor in six.items()}
    print(f"accuracy of the mean, {text:10s}: {accuracy(network, mean):.3f}")

# %% [markdown]
# Without alignment the mean guesses; aligned, it predicts nearly as well as its parts. (`average`
# and `lightning-bnn merge` do this in one call.) Convolutions, BatchNorm and residual sums work in
# the same way; a channel that goes into BatchNorm may also change its *sign*.
#
# ## A transformer
#
# Queries meet keys in a scalar product alone, so *any* invertible matrix may be applied to the
# queries of a head, if its inverse (transposed) is applied to the keys; the same holds for values
# and outputs. Heads can change places. And the *stream*, the vector to which every layer adds its
# part, could be rotated as a whole, were it not for the gains of the norms.


# %%
class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, stream):
        q, k, v = (
            layer(stream).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        seen = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.o(seen.transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    def __init__(self, width=32, heads=4):
        super().__init__()
        self.embed = nn.Conv2d(1, width, 2, 2)  # sixteen patches of 2 x 2 pixels
        self.places = nn.Parameter(0.1 * torch.randn(16, width))
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(3))
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, images):
        stream = self.embed(images).flatten(2).mT + self.places
        stream = stream + self.attention(self.norms[0](stream))
        stream = stream + self.mlp(self.norms[1](stream))
        return self.head(self.norms[2](stream.mean(1)))


pair = [trained(Transformer, seed, epochs=20) for seed in range(2)]
print("accuracies:", *(f"{accuracy(one):.3f}" for one in pair))

# %% [markdown]
# So `fold_norms` moves these gains into the layers behind them, and returns a network with the same
# outputs.

# %%
from lightning_bnn.symmetry import fold_norms, mix, random_mixings

folded = [fold_norms(one, x[:2]) for one in pair]
symmetries = discover(folded[0], x[:2])
print(symmetries)
first, second = map(params.of, folded)
mixed = mix(first, symmetries, random_mixings(symmetries, generator))
change = (params.apply(folded[0], mixed, x) - pair[0](x)).abs().max()
print(f"weights have moved by {distance(first, mixed):.1f}")
print("outputs are the same but for rounding:", bool(change < 1e-3))

# %% [markdown]
# *block perm.* are the heads. *general* are eight 8 x 8 matrices: for each head one between queries
# and keys, and one between values and outputs. *orthogonal* are rotations and reflections of the
# stream.
#
# `match` knows permutations only. `match_all` also applies matrices; it compares weights or, with
# `by="activations"`, what the networks compute on a few batches.

# %%
from matplotlib.figure import Figure

from lightning_bnn.symmetry import match_all

sources = {"model": folded[0], "batches": batches, "by": "activations"}
ways = {
    "as trained": first,
    "permutations": match(first, second, symmetries).element(first),
    "all, by weights": match_all(first, second, symmetries).element(first),
    "all, by activations": match_all(first, second, symmetries, **sources).element(first),
}
lines = {}
for text, start in ways.items():
    between = barrier(folded[0], start, second, batches)
    lines[text] = between
    print(f"{text:19s}  distance {distance(start, second):5.2f}  barrier {between.height:5.3f}")
panels["two transformers"] = lines
figure = Figure(figsize=(7.2, 4.2), layout="constrained")
for ax, (title, lines) in zip(figure.subplots(1, 2), panels.items(), strict=True):
    for text, between in lines.items():
        ax.plot(between.weights, between.losses, marker=".", label=text)
    ax.set(title=title, xlabel="position between both networks", ylabel="training loss")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False)
figure.savefig("loss_between_networks.png", dpi=100)

# %% [markdown]
# Permutations leave the barrier as high as it was; with matrices and rotations it falls to a
# quarter or less. Matching by activations ends lower although the distance is larger. (On other
# pairs the order of the last two may differ: [means over ten
# pairs](../results/alignment.md#pairs-of-transformers).)
#
# [Symmetries](../symmetry.md) has the functions, [what discovery finds](../discovery.md) the
# layers, and [alignment](../alignment.md) everything about matching.

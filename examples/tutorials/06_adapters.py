"""A posterior over the adapter of a language model: uncertain words and sentences, and merging."""

# %% [markdown]
# # A posterior over an adapter
#
# A posterior over the *adapter*, the few weights by which a large network is fine-tuned, says where
# the fine-tuned model does not know. Here the model is a tiny BERT with random weights; with
# `from_pretrained` every line is the same.
#
# The task: is each word a *thing* or an *action*? Some words are both, and the word before tells
# which: "the park" and "to park". A few words never occur in training.

# %%
import torch

things, actions = "dog tree house river train stone".split(), "see take find bring watch go".split()
both, unseen = "park book light run".split(), "zebra juggle".split()
words = ["[pad]", "the", "to", *things, *actions, *both, *unseen]
THING, ACTION, NONE = 0, 1, -100


def sentences(n, seed, things=things, actions=actions):
    """Telegrams of three phrases, with labels of which `NONE` does not count."""
    g = torch.Generator().manual_seed(seed)

    def pick(some):
        return some[int(torch.randint(len(some), (), generator=g))]

    def phrase():
        return pick(
            [
                ([pick(things)], [THING]),
                ([pick(actions)], [ACTION]),
                (["the", pick(things + both)], [NONE, THING]),
                (["to", pick(actions + both)], [NONE, ACTION]),
            ]
        )

    telegrams = [[phrase() for _ in range(3)] for _ in range(n)]
    return [encoded(*(sum(part, []) for part in zip(*one, strict=True))) for one in telegrams]


def encoded(text, labels):
    """Numbers of the words, and labels, padded to six words."""
    ids = [words.index(word) for word in text]
    pad = 6 - len(ids)
    mask = torch.tensor([1] * len(ids) + [0] * pad)
    ids, labels = torch.tensor(ids + [0] * pad), torch.tensor(labels + [NONE] * pad)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


# %% [markdown]
# ## Adapter and posterior
#
# `peft` adds the factors of LoRA to the model. `Categorical` reads a class for each token, where
# labels of -100 do not count. `MFVI` learns a Gaussian for every weight of the adapter.

# %%
from functools import partial

import lightning as L
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForTokenClassification

from lightning_bnn.likelihoods import Categorical
from lightning_bnn.modules import MFVI

torch.set_num_threads(1)
L.seed_everything(0, verbose=False)
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
config = BertConfig(vocab_size=len(words), intermediate_size=64, num_labels=2, **sizes)
bert = BertForTokenClassification(config)  # or .from_pretrained("bert-base-uncased")
lora = LoraConfig(task_type="TOKEN_CLS", r=4, target_modules=["query", "value"])
adapted = get_peft_model(bert, lora)
likelihood = Categorical(ignore_index=NONE)
quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
quiet |= {"enable_checkpointing": False, "accelerator": "cpu"}


def posterior(rows):
    adam = partial(torch.optim.Adam, lr=0.005)
    options = {"prior_std": 1.0, "init_std": 0.01, "eval_samples": 30, "optimizer": adam}
    module = MFVI(adapted, likelihood=likelihood, **options)
    L.Trainer(max_epochs=25, **quiet).fit(module, DataLoader(rows, batch_size=16, shuffle=True))
    return module


test = sentences(200, seed=1)
module = posterior(sentences(400, seed=2))
(numbers,) = L.Trainer(**quiet).test(module, DataLoader(test, batch_size=200), verbose=False)
print({name: round(numbers[f"test/{name}"], 3) for name in ("acc", "nll", "sequence_nll")})
print(module.memory())

# %% [markdown]
# `nll` is that of a word, `sequence_nll` that of a sentence. What would a model of seven billion
# weights take? On the device `meta` nothing is allocated:

# %%
from transformers import LlamaConfig, LlamaForCausalLM

with torch.device("meta"):
    llama = LlamaForCausalLM(LlamaConfig())  # of the sizes of Llama 7B
    large = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj"])
    print(MFVI(get_peft_model(llama, large)).memory())

# %% [markdown]
# ## Uncertain words
#
# The mutual information between the label of a word and the weights says how much the networks
# disagree about it.

# %%
from matplotlib.figure import Figure

from lightning_bnn.metrics import mutual_information


def batch(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


@torch.no_grad()
def outputs(module, rows):
    texts = batch(rows)
    return module.outputs((texts["input_ids"], texts["attention_mask"]))  # (networks, texts, ...)


shown = [
    "the tree to bring stone",
    "take the book house",
    "to book the dog",
    "book park light run",
    "the zebra to juggle",
    "juggle zebra",
]
rows = [encoded(text.split(), [NONE] * len(text.split())) for text in shown]
found = outputs(module, rows)
information = mutual_information(found.flatten(1, 2).softmax(-1)).view(found.shape[1:3])
information = information.where(batch(rows)["input_ids"] > words.index("to"), torch.nan)
figure = Figure(figsize=(7, 2.8), layout="constrained")
ax = figure.subplots()
image = ax.imshow(information, cmap="Oranges", aspect="auto", vmin=0)
for k, text in enumerate(shown):
    for place, word in enumerate(text.split()):
        dark = information[k, place] > 0.6 * information.nan_to_num().max()
        ax.text(place, k, word, ha="center", va="center", color="white" if dark else "black")
ax.set_axis_off()
figure.colorbar(image, label="information, nats")
figure.savefig("what_the_networks_disagree_about.png", dpi=100)

# %% [markdown]
# Words with one meaning are certain; `the` and `to` have no label. Words with two meanings are
# uncertain, less so after a deciding word. So is the new word `zebra` in one of two places: all
# networks share the untrained weights, and can be wrong together.
#
# ## Uncertain sentences
#
# The probability of all labels of a sentence is the mean over networks of a product over words, not
# the product of mean probabilities. `likelihood.sequences` computes it, the information between
# sentence and network, and the share of pairs of networks that label the sentence differently.

# %%
from lightning_bnn.metrics import auroc

more = sentences(400, 3, [*things, "zebra"], [*actions, "juggle"])
is_new = [bool((row["input_ids"] >= words.index("zebra")).any()) for row in more]
sets = {
    "known words": test,
    "a new word": [row for row, new in zip(more, is_new, strict=True) if new],
}
scores = {}
print(f"{'':12s} texts  log-likelihood  word by word  information  disagreement")
for name, rows in sets.items():
    found, labels = outputs(module, rows), batch(rows)["labels"]
    by_word = likelihood.log_prob(found.softmax(-1).mean(0).log(), labels).mean()
    scores[name] = likelihood.sequences(found, labels)
    mean = [score.double().mean() for score in scores[name]]
    print(
        f"{name:12s} {len(rows):5d} {mean[0]:15.3f} {by_word:13.3f} {mean[1]:12.3f} {mean[2]:13.2f}"
    )
every = torch.cat([scores[name].information for name in sets])
is_ood = torch.arange(len(every)) >= len(test)
print(f"AUROC of sentences with a new word by their information: {auroc(every, is_ood):.2f}")

# %% [markdown]
# Sentences with a new word have more information and more disagreement. The two log-likelihoods
# hardly differ here; where networks contradict each other, as members of an ensemble do, the second
# is too low.
#
# ## Two adapters, one model
#
# Two colleagues fine-tune the model, each with half of the words. `merge_gaussians` multiplies
# their posteriors, and divides by the common prior. Any matrix may stand between the factors B A of
# an adapter, so with `symmetries`, the factors of one are first rotated to those of the other.

# %%
from lightning_bnn import params as P
from lightning_bnn.posteriors import merge_gaussians
from lightning_bnn.symmetry import discover

halves = [sentences(400, 4 + k, things[k::2], actions[k::2]) for k in (0, 1)]
modules = [posterior(rows) for rows in halves]
one, other = (module.posterior() for module in modules)
template, texts = modules[0].template.eval(), batch(test)
inputs = texts["input_ids"], texts["attention_mask"]
symmetries = discover(template, *(x[:1] for x in inputs))


def report(name, network):
    outputs = P.apply(template, P.stack([network]), *inputs)[0]
    rows, labels = likelihood.rows(outputs, texts["labels"])
    accuracy = (rows.argmax(-1) == labels).double().mean()
    print(
        f"{name:26s} {accuracy:8.3f} {-likelihood.log_prob(outputs, texts['labels']).mean():14.2f}"
    )


print(f"{'mean networks':26s} accuracy  nats, sentence")
report("one", one.centre)
report("other", other.centre)
report("average", {name: (t + other.centre[name]) / 2 for name, t in one.centre.items()})
report("by precisions", merge_gaussians([one, other], prior_std=1.0).centre)
merged = merge_gaussians([one, other], prior_std=1.0, symmetries=symmetries)
report("by precisions, in a frame", merged.centre)

# %% [markdown]
# The merged adapter knows nearly all words. In five repetitions with other seeds the last row was
# the best each time: 0.47 nats on average, against 0.64 by precisions alone and 0.69 by the plain
# average.
#
# `module.member(0)` is a peft model again, with `save_pretrained` and `merge_and_unload`. More is
# in [networks of timm and Hugging Face](../other_networks.md) and
# [merge](../merge.md#merge-posteriors).

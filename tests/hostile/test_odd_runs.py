"""Training runs that callbacks must neither stop nor leave without a word."""

import lightning as L
import pytest
import torch
from module_cases import trainer
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_bnn.callbacks import MassGap, PermutationTau
from lightning_bnn.modules import DeepEnsemble

pytestmark = pytest.mark.filterwarnings("ignore")


class LanguageModel(nn.Module):
    """Called by name, with arguments that can only be given so, as those of Hugging Face are."""

    def __init__(self):
        super().__init__()
        self.embed, self.hidden, self.head = nn.Embedding(9, 6), nn.Linear(6, 8), nn.Linear(8, 9)
        self.register_buffer("shift", torch.zeros(1, 8))

    def forward(self, *, input_ids=None, attention_mask=None, labels=None, **more):
        h = torch.relu(self.hidden(self.embed(input_ids)) + self.shift)
        logits = self.head(h) * attention_mask[..., None]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits, "cache": object()}  # no tensor


class Run(L.LightningModule):
    def __init__(self, step=0.0):
        super().__init__()
        self.model, self.step = LanguageModel(), step

    def training_step(self, batch, index):
        loss = self.model(**batch)["loss"]
        self.model.shift += self.step
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Stream(IterableDataset):
    def __iter__(self):
        for k in range(12):
            yield torch.full((4,), k / 12), k % 3


def tokens():
    rows = [torch.randint(9, (5,)) for _ in range(12)]
    every = [{"input_ids": r, "attention_mask": torch.ones(5), "labels": r} for r in rows]
    return DataLoader(every, batch_size=4)


def ensemble():
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    return DeepEnsemble(net, members=2, num_data=12)


@pytest.mark.parametrize(
    ("module", "data"),
    [(Run, tokens), (ensemble, lambda: DataLoader(Stream(), batch_size=4))],
    ids=["called by name", "streams of batches"],
)
def test_odd_runs_are_watched(module, data, recwarn):
    tau, gap = PermutationTau(), MassGap(every_n_steps=1)
    trainer(max_steps=3, callbacks=[tau, gap], log_every_n_steps=1).fit(module(), data())
    assert not [w for w in recwarn if "switched off" in str(w.message)]
    assert (len(tau.history), len(gap.history)) == (3, 3)


def test_constants_that_change_are_read_anew(recwarn):
    gap = MassGap(every_n_steps=1)
    trainer(max_steps=3, callbacks=[gap], log_every_n_steps=1).fit(Run(0.1), tokens())
    assert not [w for w in recwarn if "switched off" in str(w.message)]
    assert len(gap.history) >= 1

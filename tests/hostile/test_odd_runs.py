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


class Opaque:
    """An output that is no tensor, such as a cache."""

    def __init__(self, tensor):
        self.tensor = tensor


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
        return {"loss": loss, "logits": logits, "cache": Opaque(h)}


class Run(L.LightningModule):
    def __init__(self, after_step=lambda model: None):
        super().__init__()
        self.model, self.after_step = LanguageModel(), after_step

    def training_step(self, batch, index):
        loss = self.model(**batch)["loss"]
        self.after_step(self.model)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def tokens():
    rows = [torch.randint(9, (5,)) for _ in range(12)]
    every = [{"input_ids": r, "attention_mask": torch.ones(5), "labels": r} for r in rows]
    return DataLoader(every, batch_size=4)


def fitted(module, data, callbacks):
    trainer(max_steps=3, callbacks=callbacks, log_every_n_steps=1).fit(module, data)
    return callbacks


def test_networks_called_by_name_are_watched(recwarn):
    tau, gap = fitted(Run(), tokens(), [PermutationTau(), MassGap(every_n_steps=1)])
    assert not [w for w in recwarn if "switched off" in str(w.message)]
    assert len(tau.history) == 3
    assert len(gap.history) == 3


def test_what_cannot_be_looked_at_any_more_is_said_and_training_goes_on():
    def change(model):
        model.shift += 0.1

    with pytest.warns(UserWarning, match="MassGap is switched off: .*'shift' was read as a const"):
        (gap,) = fitted(Run(change), tokens(), [MassGap(every_n_steps=1)])
    assert gap.history == [] or len(gap.history) == 1


class Stream(IterableDataset):
    def __iter__(self):
        for k in range(12):
            yield torch.full((4,), k / 12), k % 3


def test_streams_of_batches_are_watched(recwarn):
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    ensemble = DeepEnsemble(net, members=2, num_data=12)
    data = DataLoader(Stream(), batch_size=4)
    tau, gap = fitted(ensemble, data, [PermutationTau(), MassGap(every_n_steps=1)])
    assert not [w for w in recwarn if "switched off" in str(w.message)]
    assert len(tau.history) == 3
    assert len(gap.history) == 3

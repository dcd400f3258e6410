import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_bnn.callbacks import MassGap
from weightsym import discover, min_mass
from weightsym import params as P


class Heads(L.LightningModule):
    """A small network with two attention heads, with units to scale or without."""

    def __init__(self, scales=True, optimizer=torch.optim.SGD, net=None):
        super().__init__()
        torch.manual_seed(0)
        self.optimizer = optimizer
        self.net = _Net(scales) if net is None else net()

    def training_step(self, batch, _):
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def configure_optimizers(self):
        options = {"momentum": 0.9} if self.optimizer is torch.optim.SGD else {}
        return self.optimizer(self.parameters(), lr=0.02, **options)


class _Net(nn.Module):
    def __init__(self, scales):
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)
        self.act = nn.ReLU() if scales else nn.Tanh()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 2)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.b(self.act(self.a(x + self.out(h))))


def fit(module, *callbacks, steps=4, **options):
    g = torch.Generator().manual_seed(0)
    data = [(torch.randn(3, 5, 4, generator=g), torch.randn(3, 5, 2, generator=g))] * steps
    trainer = L.Trainer(
        max_steps=steps, logger=False, enable_checkpointing=False, accelerator="cpu",
        enable_progress_bar=False, enable_model_summary=False, callbacks=list(callbacks), **options,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None))
    return trainer


@pytest.mark.parametrize("scales", [True, False])
def test_excess_by_kind_of_group(scales):
    module, gap = Heads(scales), MassGap(2)
    trainer = fit(module, gap)
    sym, params = discover(module.net.eval(), torch.randn(2, 5, 4)), P.of(module.net)
    expected = [min_mass(params, sym, mixing=m).excess.item() for m in (False, "only", True)]
    names = ("mass_excess", "mass_excess/heads", "mass_excess/joint")
    found = [trainer.callback_metrics[n].item() for n in names]
    assert found == pytest.approx(expected, rel=1e-3)
    assert expected[2] >= expected[1] > 0
    assert [len(row) for _, row in gap.history] == [5, 5]

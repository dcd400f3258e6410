"""Numbers that no symmetry changes, and the kinship of networks that they tell."""

import pytest
import torch
from checked_symmetries import seeded
from known_networks import NETWORKS, ORDERED, REPEATED
from torch import nn

from weightsym import Element, discover, fold_norms, kinship, likeness
from weightsym import params as P

SMALL = [name for name in ORDERED if name not in REPEATED][::9]
"""Networks for which the law is cheap enough for every run."""


def marked(name):
    slow = [pytest.mark.slow] if NETWORKS[name].slow else []
    return pytest.param(name, marks=slow or ([] if name in SMALL else [pytest.mark.e2e]))


def narrow(monkeypatch):
    """Frames of few columns count, too: those of known networks are small."""
    monkeypatch.setattr("weightsym.forms.likeness._FEWEST", 2)


def no_symmetry_changes_it(params, sym):
    before = likeness(params, sym)
    for seed in range(3):
        after = likeness(Element.random(sym, seeded(seed))(params), sym)
        for key, products in before.items():
            torch.testing.assert_close(after[key], products, rtol=1e-3, atol=1e-3)


def test_most_networks_can_be_compared(monkeypatch):
    """Without this, the law above could hold because nothing is compared."""
    narrow(monkeypatch)
    found = [bool(likeness(P.of(NETWORKS[n].known()[0]), NETWORKS[n].known()[2])) for n in SMALL]
    assert sum(found) > len(found) / 3


class Block(nn.Module):
    """Tokens, a stream with norms and gains, and a gated layer."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.norm = nn.Embedding(40, 16), nn.RMSNorm(16)
        self.up, self.gate, self.down = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)
        self.last, self.head = nn.RMSNorm(16), nn.Linear(16, 40, bias=False)
        for norm in (self.norm, self.last):
            norm.weight.data.uniform_(0.5, 2)

    def forward(self, tokens):
        x = self.embed(tokens)
        y = self.norm(x)
        return self.head(self.last(x + self.down(self.up(y) * self.gate(y).sigmoid())))


def likeness_of(net):
    folded = fold_norms(net, tokens())
    return likeness(P.of(folded), discover(folded, tokens()))


def tokens():
    return torch.randint(40, (3, 5), generator=seeded(0))


def disguised(net, seed):
    """The same function with another stream, other gains, and other hidden units."""
    turn = torch.linalg.qr(torch.randn(16, 16, generator=seeded(seed))).Q
    order = torch.randperm(24, generator=seeded(seed))
    new = Block()
    new.load_state_dict(net.state_dict())
    gains = 0.5 + torch.rand(2, 16, generator=seeded(seed))
    with torch.no_grad():
        new.embed.weight.copy_(net.embed.weight @ turn)
        for layer in ("up", "gate"):
            old = getattr(net, layer)
            getattr(new, layer).weight.copy_(
                (old.weight * net.norm.weight @ turn / gains[0])[order]
            )
            getattr(new, layer).bias.copy_(old.bias[order])
        new.down.weight.copy_(turn.mT @ net.down.weight[:, order])
        new.down.bias.copy_(net.down.bias @ turn)
        new.head.weight.copy_(net.head.weight * net.last.weight @ turn / gains[1])
        new.norm.weight.copy_(gains[0])
        new.last.weight.copy_(gains[1])
    return new


def test_a_turned_stream_and_other_gains_are_seen_through():
    net, other = Block(), Block(1)
    hidden = disguised(net, 5)
    torch.testing.assert_close(hidden(tokens()), net(tokens()), rtol=1e-3, atol=1e-4)
    a, b, c = map(likeness_of, (net, hidden, other))
    assert {"embed.weight", "up.weight", "gate.weight"} <= a.keys()
    assert kinship([a, b])[0, 1] > 0.999
    assert kinship([a, c])[0, 1] < 0.9


def test_kinship_is_the_correlation_beyond_the_mean_of_the_others():
    rows = torch.randn(6, 50, generator=seeded(0)).double() + 1
    found = kinship([{"w": row} for row in rows])
    units = rows / rows.norm(dim=1, keepdim=True)
    for i in range(6):
        for j in range(i):
            rest = [units[k] for k in range(6) if k not in (i, j)]
            a, b = (units[k] - torch.stack(rest).mean(0) for k in (i, j))
            assert found[i, j] == pytest.approx(float(a @ b / a.norm() / b.norm()), abs=1e-9)

import pytest
import torch
import torch.nn.functional as F
import torchvision
from cases import Forward
from known_networks.mixing import TOKENS, Decoder
from torch import nn

from weightsym import Element, discover, fingerprint, fold_norms, relation, verify
from weightsym import params as P
from weightsym.discovery.folding import fold_networks


def randomised(model):
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model.double().eval()


class HandWritten(nn.Module):
    """An RMSNorm as models write it, with a gain around zero if wanted."""

    def __init__(self, d, around_zero=False):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.randn(d)), 1e-6
        self.around_zero = around_zero

    def forward(self, x):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return x * (1 + self.weight if self.around_zero else self.weight)


class Residual(nn.Module):
    """One residual block before a norm and a head."""

    def __init__(self, norm, bias=True, d=6):
        super().__init__()
        self.first, self.head = nn.Linear(3, d), nn.Linear(d, 2, bias=bias)
        self.up, self.down = nn.Linear(d, 5, bias=bias), nn.Linear(5, d)
        self.norm1, self.norm2 = norm(d), norm(d)

    def forward(self, x):
        h = self.first(x)
        h = h + self.down(torch.tanh(self.up(self.norm1(h))))
        return self.head(self.norm2(h))


class Transposed(nn.Module):
    """A linear map with its inputs first, as GPT-2 has them."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        return x @ self.weight + self.bias


def transposed(width):
    """A residual block whose upper layer, of any width, reads the norm by its first dimension."""
    model = Residual(nn.LayerNorm)
    model.up, model.down = Transposed(6, width), nn.Linear(width, 6)
    return model


class Typed(Residual):
    """A block that asks the gain of a norm for its type, as Mamba does."""

    def forward(self, x):
        return super().forward(x.to(self.norm1.weight.dtype))


def vit():
    model = torchvision.models.VisionTransformer(8, 4, 1, 2, 8, 16, num_classes=3)
    return nn.Sequential(model)


VECTORS = torch.randn(4, 3, generator=torch.Generator().manual_seed(1)).double()
SEQUENCES = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(1)).double()
IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)).double()
NETWORKS = {
    "decoder": (lambda: Decoder(), TOKENS, "orthogonal"),
    "by hand": (lambda: Residual(HandWritten), VECTORS, "orthogonal"),
    "around zero": (lambda: Residual(lambda d: HandWritten(d, True)), VECTORS, "orthogonal"),
    "inputs first": (lambda: transposed(5), VECTORS, "centred"),
    "inputs first, square": (lambda: transposed(6), VECTORS, "centred"),
    "asked for its type": (lambda: Typed(HandWritten), VECTORS, "orthogonal"),
    "readers without bias": (lambda: Residual(nn.LayerNorm, bias=False), VECTORS, "centred"),
    "vit": (vit, IMAGES, "centred"),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_stream_turns_once_the_gains_are_folded(name):
    build, x, kind = NETWORKS[name]
    model = randomised(build())
    before = {n: p.clone() for n, p in model.state_dict().items()}
    folded = fold_norms(model, x)
    assert all(torch.equal(before[n], p) for n, p in model.state_dict().items())
    for inputs in (x, x[:1], x.flip(0)):
        torch.testing.assert_close(folded(inputs), model(inputs), rtol=1e-10, atol=1e-10)
        with torch.no_grad():
            torch.testing.assert_close(folded(inputs), model(inputs), rtol=1e-10, atol=1e-10)
    with_gains, without = discover(model, x), discover(folded, x)
    assert kind not in {g.kind for g in with_gains.linear}
    assert [g.kind for g in without.linear].count(kind) == 1
    assert without.error < 1e-10
    assert verify(folded, without, x[:1]) < 1e-10
    gone = {"norm1", "norm2", "n1", "n2", "ln_1", "ln_2", "ln", "norm"}
    assert not any(n.split(".")[-2] in gone for n in dict(folded.named_parameters()) if "." in n)


def test_again_there_is_nothing_to_fold():
    model = randomised(Residual(nn.LayerNorm))
    once = fold_norms(model, VECTORS)
    twice = fold_norms(once, VECTORS)
    assert all(
        torch.equal(a, b) for a, b in zip(once.parameters(), twice.parameters(), strict=True)
    )
    with pytest.raises(AssertionError):
        torch.testing.assert_close(model.up.weight, once.up.weight)


def tied():
    """A head that is the embedding."""
    layers = {"norm": nn.RMSNorm(6), "embed": nn.Embedding(5, 6)}
    return Forward(lambda s, x: F.linear(s.norm(s.embed(x)), s.embed.weight), **layers)


def masked(read):
    """A norm that is read by an activation, or a linear map whose weight is computed."""
    return lambda: Forward(read, norm=nn.LayerNorm(3), head=nn.Linear(3, 2))


def post_norm():
    """A sum reads the norm."""
    layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True)
    return nn.Sequential(nn.Linear(3, 8), layer, nn.Linear(8, 4))


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("build", "x"),
    [
        (tied, TOKENS),
        (post_norm, SEQUENCES),
        (masked(lambda s, x: s.head(s.norm(x).relu())), VECTORS),
        (masked(lambda s, x: F.linear(s.norm(x), 2 * s.head.weight)), VECTORS),
        (lambda: nn.LayerNorm(3), VECTORS),  # the output itself
        (lambda: nn.Sequential(nn.RMSNorm(3), nn.ReLU(), nn.Linear(3, 2)), VECTORS),
    ],
)
def test_what_cannot_be_folded_is_refused_or_left(build, x):
    model = randomised(build())
    with pytest.raises(ValueError, match="cannot be folded: only linear maps may read it"):
        fold_norms(model, x)
    left = fold_norms(model, x, partial=True)
    torch.testing.assert_close(left(x), model(x), rtol=1e-10, atol=1e-10)


def test_networks_are_folded_with_a_module_that_has_no_weights():
    """The gains of each network go into its own maps; the module only gives the computation."""
    networks = [P.of(randomised(Residual(nn.LayerNorm))) for _ in range(2)]
    networks[1] = {n: 2 * t for n, t in networks[1].items()}
    with torch.device("meta"):
        empty = Residual(nn.LayerNorm).double().eval()
    folded, every = fold_networks(empty, networks, VECTORS)
    assert not any("norm" in name for name in every[0])
    for before, after in zip(networks, every, strict=True):
        whole = Residual(nn.LayerNorm).double().eval()
        torch.testing.assert_close(P.apply(folded, after, VECTORS), P.apply(whole, before, VECTORS))
    assert not torch.allclose(every[0]["up.weight"], every[1]["up.weight"])


@pytest.mark.parametrize("name", ["decoder", "by hand"])
def test_gains_and_rotations_hide_no_network(name):
    """A network whose gains are others and whose stream was rotated is the same function."""
    build, x, _ = NETWORKS[name]
    model = randomised(build())
    attacked = Element.random(discover(model, x), torch.Generator().manual_seed(1))(P.of(model))
    folded, (own, moved) = fold_networks(model, [P.of(model), attacked], x)
    sym = discover(folded, x)
    moved = Element.random(sym, torch.Generator().manual_seed(2))(moved)
    assert relation(moved, own, sym).verdict == "same function"
    assert fingerprint(moved, sym).agrees(fingerprint(own, sym))
    gains = [n for n in attacked if not torch.allclose(attacked[n], P.of(model)[n])]
    assert any("norm" in n for n in gains)

import pytest
import torch
from cases import Forward
from torch import nn

from lightning_bnn import models
from weightsym import barrier, interpolate, repair
from weightsym import params as P


class Branches(nn.Module):
    """Convolutions with and without bias, grouped, transposed and one-dimensional, called twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, bias=False)
        self.grouped = nn.Conv2d(4, 6, 2, groups=2)
        self.up = nn.ConvTranspose2d(6, 4, 2, groups=2, bias=False)
        self.line = nn.Conv1d(4, 3, 3)
        self.hidden, self.last = nn.Linear(3, 5, bias=False), nn.Linear(5, 2)

    def forward(self, x):
        x = torch.relu(self.up(torch.relu(self.grouped(torch.relu(self.first(x))))))
        x = torch.relu(self.line(x.flatten(2))).mean(-1)
        return self.last(torch.relu(self.hidden(x))).unflatten(1, (2, 1))[..., 0]


def two(build):
    return [P.of(build().double()) for _ in range(2)]


def statistics(model, params, inputs, layers):
    """Mean and deviation of every channel of some layers, all samples at once."""
    seen = {}
    hooks = [
        model.get_submodule(n).register_forward_hook(lambda m, a, y, n=n: seen.update({n: y}))
        for n in layers
    ]
    with torch.no_grad():
        P.apply(model, params, torch.cat(inputs))
    for hook in hooks:
        hook.remove()
    dims = {
        n: [d for d in range(y.ndim) if d != (1 if y.ndim > 2 else -1 % y.ndim)]
        for n, y in seen.items()
    }
    return {n: (y.mean(dims[n]), y.std(dims[n], correction=0)) for n, y in seen.items()}


CASES = {
    "mlp": (lambda: models.mlp(4, [6, 5], 3), (9, 4), ["1", "3"]),
    "branches": (Branches, (9, 2, 6, 6), ["first", "grouped", "up", "line", "hidden"]),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("weight", [0.5, 0.2])
def test_means_and_deviations_are_those_between_the_ends(name, weight):
    build, shape, layers = CASES[name]
    model = build().double()
    a, b = two(build)
    inputs = [torch.randn(n, *shape[1:]).double() for n in (9, 4)]
    middle = interpolate(a, b, weight)
    runs, repaired = repair(model, middle, a, b, weight, inputs)
    at_a, at_b = (statistics(model, end, inputs, layers) for end in (a, b))
    now = statistics(runs, repaired, inputs, layers)
    before = statistics(model, middle, inputs, layers)
    for layer in layers:
        for k in range(2):
            goal = torch.lerp(at_a[layer][k], at_b[layer][k], weight)
            assert torch.allclose(now[layer][k], goal, atol=1e-9)
        assert not torch.allclose(before[layer][1], goal, atol=1e-3)  # means are linear
    last = "last" if name == "branches" else "5"
    assert torch.equal(repaired[f"{last}.weight"], middle[f"{last}.weight"])
    runs, same = repair(model, a, a, b, 0.0, inputs)  # an end stays what it is
    assert torch.allclose(P.apply(runs, same, inputs[0]), P.apply(model, a, inputs[0]))
    assert name == "mlp" or model.first.bias is None


def fused():
    layer = nn.TransformerEncoderLayer(8, 2, 6, batch_first=True)
    return nn.Sequential(nn.Linear(3, 8), layer, nn.Linear(8, 3))


def heads():
    """Two heads behind one hidden layer."""
    parts = {"hidden": nn.Linear(3, 4), "mean": nn.Linear(4, 2), "scale": nn.Linear(4, 2)}

    def forward(s, x):
        x = torch.relu(s.hidden(x))
        return {"mean": s.mean(x)[..., None], "scale": s.scale(x)}

    return Forward(forward, **parts)


def normalised():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), nn.LogSoftmax(-1))


@pytest.mark.parametrize(
    ("build", "stays", "repaired"),
    [
        (fused, {"2"}, {"0", "1.linear1", "1.linear2"}),
        (heads, {"mean", "scale"}, {"hidden"}),
        (normalised, {"2"}, {"0"}),
    ],
)
def test_layers_of_the_output_stay_and_others_are_repaired(build, stays, repaired):
    a, b = two(build)
    middle, inputs = interpolate(a, b, 0.5), [torch.randn(9, 4, 3).double()]
    _, after = repair(build().double(), middle, a, b, 0.5, inputs)
    changed = {n.rpartition(".")[0] for n in middle if not torch.equal(after[n], middle[n])}
    assert repaired <= changed
    assert not stays & changed


def test_units_that_never_vary_are_shifted_only():
    model = models.mlp(3, [4], 2).double()
    a, b = two(lambda: models.mlp(3, [4], 2))
    for end, value in ((a, 1.0), (b, 3.0)):
        end["1.weight"] = end["1.weight"] * torch.tensor([0.0, 1, 1, 1])[:, None]
        end["1.bias"] = end["1.bias"] * 0 + value
    middle = {n: t * 0 if n.startswith("1") else t for n, t in interpolate(a, b, 0.5).items()}
    _, repaired = repair(model, middle, a, b, 0.5, [torch.randn(8, 3).double()])
    assert float(repaired["1.bias"][0]) == pytest.approx(2.0)
    assert not repaired["1.weight"].any()


def test_a_barrier_says_what_was_done_and_repairs_lower_it():
    torch.manual_seed(0)
    model = models.mlp(5, [32, 32, 32], 3).double()
    a, b = ({n: 2 * t for n, t in w.items()} for w in two(lambda: models.mlp(5, [32, 32, 32], 3)))
    batches = [(x, P.apply(model, a, x).argmax(1)) for x in torch.randn(2, 50, 5).double()]
    plain = barrier(model, a, b, batches, points=3)
    after = barrier(model, a, b, batches, points=3, repair=True)
    assert (plain.statistics, after.statistics) == ("as-is", "repaired")
    runs, params = repair(model, interpolate(a, b, 0.5), a, b, 0.5, batches)
    losses = [nn.functional.cross_entropy(P.apply(runs, params, x), y) for x, y in batches]
    assert after.losses[1] == pytest.approx(float(torch.stack(losses).mean()))
    assert after.losses[0] == pytest.approx(plain.losses[0])
    assert after.losses[1] != pytest.approx(plain.losses[1], rel=1e-3)


def test_batch_norm_is_estimated_anew_instead():
    def build():
        return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    model = build().double()
    a, b = two(build)
    batches = [(x, torch.randint(3, (20,))) for x in torch.randn(2, 20, 5).double()]
    again = barrier(model, a, b, batches, points=3)
    assert again.statistics == "re-estimated"
    assert barrier(model, a, b, batches, points=3, repair=True) == again
    assert barrier(model, a, b, batches, points=3, batch_norm="as-is").statistics == "as-is"
    _, params = repair(model, interpolate(a, b, 0.5), a, b, 0.5, batches)
    hidden = torch.cat([x for x, _ in batches]) @ params["0.weight"].T + params["0.bias"]
    assert torch.allclose(params["1.running_mean"], hidden.mean(0))


def test_lines_have_the_precision_of_their_first_end():
    a, b = P.of(models.mlp(3, [4], 2)), P.of(models.mlp(3, [4], 2).double())
    middle = interpolate(a, b, 0.5)
    assert {t.dtype for t in middle.values()} == {torch.float32}
    assert all(torch.allclose(2 * middle[n].double(), a[n] + b[n]) for n in a)

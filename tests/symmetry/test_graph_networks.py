"""Graph networks by hand: channels pass along edges, nodes are like examples of a batch."""

import pytest
import torch
import torch.nn.functional as F
from cases import Forward
from checked_symmetries import exact, sizes, units
from torch import nn

lin = nn.Linear


def graph(nodes, edges):
    generator = torch.Generator().manual_seed(nodes)
    x = torch.randn(nodes, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(nodes, (2, edges), generator=generator)


def received(h, e, messages):
    return torch.zeros_like(h).index_add(0, e[1], messages)


def gcn(s, x, e):
    ones = torch.ones(e.shape[1], dtype=x.dtype)
    degree = torch.zeros(len(x), dtype=x.dtype).index_add(0, e[1], ones).clamp(min=1)
    size = (degree[e[0]] * degree[e[1]]).rsqrt()[:, None]
    h = s.a(x)
    h = torch.relu(received(h, e, h.index_select(0, e[0]) * size))
    at = e[1][:, None].expand(-1, 6)
    return s.c(torch.relu(s.b(torch.zeros_like(h).scatter_add(0, at, h[e[0]] * size))))


def gin(s, x, e):
    h = s.a(x)
    h = torch.relu(1.5 * h + received(h, e, h[e[0]]))
    return s.c(torch.relu(s.b(h)))


def sage(s, x, e):
    h = torch.relu(s.a(x))
    at = e[1][:, None].expand(-1, 6)
    largest = torch.zeros_like(h).scatter_reduce(0, at, h[e[0]], "amax", include_self=False)
    return s.c(torch.relu(s.b(largest) + s.own(h)))


def put(s, x, e):
    h = torch.relu(s.a(x))
    h = torch.zeros_like(h).index_put((e[1],), h[e[0]], accumulate=True)
    return s.c(torch.relu(s.b(h)))


def gathered(s, x, e):
    h = torch.relu(s.a(x))
    return s.c(torch.relu(s.b(h.gather(0, e[0][:, None].expand(-1, 6)))))


@pytest.mark.parametrize("forward", [gcn, gin, sage, put, gathered])
def test_channels_pass_along_edges(forward):
    layers = {"a": lin(4, 6), "b": lin(6, 5), "own": lin(6, 5), "c": lin(5, 2)}
    if forward is not sage:
        layers.pop("own")
    model = Forward(forward, **layers).double()
    sym = exact(model, *graph(6, 11), others=[graph(9, 14), graph(3, 2)])
    assert (sizes(sym), sym.scaling_dof, sym.sign_dof) == ([6, 5], 11, 0)
    assert not sym.frozen


def mean_of_tanh(s, x, e):
    h = torch.tanh(s.a(x))
    at = e[1][:, None].expand(-1, 6)
    h = torch.zeros_like(h).scatter_reduce(0, at, h[e[0]], "mean", include_self=False)
    return s.c(torch.tanh(s.b(h)))


def test_signs_pass_through_a_mean_over_edges():
    model = Forward(mean_of_tanh, a=lin(4, 6), b=lin(6, 5), c=lin(5, 2)).double()
    sym = exact(model, *graph(6, 11))
    assert (sizes(sym), sym.scaling_dof, sym.sign_dof) == ([6, 5], 0, 11)


def largest_of_tanh(s, x, e):
    h = torch.tanh(s.a(x))
    at = e[1][:, None].expand(-1, 6)
    return s.c(torch.zeros_like(h).scatter_reduce(0, at, h[e[0]], "amax"))


def test_signs_do_not_pass_through_a_maximum_over_edges():
    sym = exact(Forward(largest_of_tanh, a=lin(4, 6), c=lin(6, 2)).double(), *graph(6, 11))
    assert (sizes(sym), sym.sign_dof) == ([6], 0)


def gat(s, x, e):
    h = s.a(x).view(-1, 2, 3)
    score = (h * s.target).sum(-1)[e[1]] + (h * s.source).sum(-1)[e[0]]
    score = F.leaky_relu(score, 0.2).exp()
    total = torch.zeros(len(x), 2, dtype=x.dtype).index_add(0, e[1], score)
    messages = h[e[0]] * (score / total[e[1]])[..., None]
    return s.c(F.elu(received(h, e, messages)).flatten(1))


def test_heads_of_graph_attention_are_exchanged():
    vectors = {n: nn.Parameter(torch.randn(2, 3)) for n in ("target", "source")}
    model = Forward(gat, a=lin(4, 6), c=lin(6, 2), **vectors).double()
    sym = exact(model, *graph(6, 11), others=[graph(9, 14)])
    assert units(sym) == [(3, "channel"), (3, "channel"), (2, "block")]


def relational(s, x, e, kind):
    messages = torch.bmm(x[e[0]][:, None], s.w[kind])[:, 0]
    return s.c(torch.relu(torch.zeros(len(x), 5, dtype=x.dtype).index_add(0, e[1], messages)))


def test_relations_have_their_own_matrix_and_stay_where_they_are():
    model = Forward(relational, w=nn.Parameter(torch.randn(3, 4, 5)), c=lin(5, 2)).double()
    sym = exact(model, *graph(6, 11), torch.arange(11) % 3)
    assert (sizes(sym), sym.scaling_dof) == ([5], 5)


def test_channels_picked_by_the_input_are_held_fixed():
    def forward(s, x, e):
        return s.c(torch.relu(s.a(x)).gather(1, e[:1, :6].expand(len(x), -1) % 6))

    sym = exact(Forward(forward, a=lin(4, 6), c=lin(6, 2)).double(), *graph(6, 11))
    assert not sym.permutations
    assert [f.operation for f in sym.frozen] == ["gather"]


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_embeddings(mode):
    table = nn.EmbeddingBag(9, 5, mode=mode)

    def forward(s, i, at):
        return s.c(torch.relu(s.table(i, at)))

    model = Forward(forward, table=table, c=lin(5, 2)).double()
    i = torch.randint(9, (7,), generator=torch.Generator().manual_seed(0))
    sym = exact(model, i, torch.tensor([0, 3, 5]), others=[(i, torch.tensor([0, 1, 4]))])
    assert (sizes(sym), sym.scaling_dof) == ([5], 5)
    assert not sym.frozen

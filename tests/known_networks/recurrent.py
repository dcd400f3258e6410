"""Recurrences, states that grow, and graphs, along whose edges channels pass."""

from functools import partial

import torch
from torch import nn

from known_networks.table import network, parameter

SEQUENCE = {"inputs": (2, 4, 5), "others": [(3, 7, 5)]}
loop = partial(network, out=(6, 3), **SEQUENCE)


# ------------------------------------------------------------ cells and layers
def in_a_loop(s, x):
    h = c = x.new_zeros(len(x), 6)
    outs = []
    for t in range(x.shape[1]):
        if isinstance(s.cell, nn.LSTMCell):
            h, c = s.cell(x[:, t], (h, c))
        else:
            h = s.cell(x[:, t], h)
        outs.append(h)
    return s.out(torch.stack(outs, 1))


CELLS = {
    "GRU": (lambda: nn.GRUCell(5, 6), 0, 6),
    "LSTM without biases": (lambda: nn.LSTMCell(5, 6, bias=False), 0, 6),
}
for name, (cell, *counts) in CELLS.items():
    loop("6", *counts, name=f"cells in a loop, {name}", cell=cell)(in_a_loop)
gru = partial(loop, cell=lambda: nn.GRUCell(5, 6), others=None)


@gru("6", 0, 6)
def a_loop_without_a_first_state(s, x):
    return s.out(s.cell(x[:, 1], s.cell(x[:, 0])))


@loop("6", 0, 6, hidden=(11, 6), out=(11, 3))
def the_loop_of_the_tutorials(s, x):
    """Inputs and state side by side."""
    h = torch.zeros(len(x), 6, dtype=x.dtype)
    for t in range(x.shape[1]):
        both = torch.cat([x[:, t], h], 1)
        h = torch.tanh(s.hidden(both))
    return s.out(both)


@network("", 0, 0, hidden=(11, 6), out=(6, 3), inputs=[(2, 5), (2, 6)], held="hidden|out")
def a_state_that_is_given_and_returned(s, x, h):
    h = torch.tanh(s.hidden(torch.cat([x, h], 1)))
    return s.out(h), h


def first(s, x):
    return s.out(s.layer(x)[0])


deep = {"proj_size": 4, "batch_first": True, "bidirectional": True, "bias": False}
loop("4*4 6*4", 16, 40, name="projections in both directions", out=(8, 3),
     layer=lambda: nn.LSTM(5, 6, 2, **deep))(first)  # fmt: skip


@loop("6", 0, 6, layer=lambda: nn.LSTM(5, 6, batch_first=True), h=parameter(1, 1, 6),
      c=parameter(1, 1, 6), moves="h c")  # fmt: skip
def learned_states(s, x):
    states = [state.expand(-1, len(x), -1).contiguous() for state in (s.h, s.c)]
    return s.out(s.layer(x, tuple(states))[0])


once = partial(network, layer=lambda: nn.GRU(5, 6, batch_first=True), out=(6, 3))


@once("", 0, 0, inputs=[(2, 4, 5), (1, 2, 6)], held=None)
def a_state_that_is_given(s, x, h):
    return s.out(s.layer(x, h)[0])


# ------------------------------------------------------------ states that grow
# matrices of keys, of values, a number between scores and values
states = partial(network, "3 5", 9, 9, dimension=9 + 25 + 1, q=(4, 3), k=(4, 3), v=(4, 5),
                 o=(5, 4), inputs=(30, 4, 4), others=[(3, 6, 4)])  # fmt: skip


@states(name="states, first")
def growing(s, x):
    q, k, v = s.q(x), s.k(x), s.v(x)
    state, rows = None, []
    for t in range(x.shape[1]):
        new = torch.einsum("bd,be->bde", k[:, t], v[:, t])
        state = new if state is None else state + new
        rows.append(torch.einsum("bd,bde->be", q[:, t], state))
    return s.o(torch.stack(rows, 1))


@states()
def running_sums(s, x):
    state = (s.k(x)[..., None] * s.v(x)[..., None, :]).cumsum(1)
    return s.o(torch.einsum("btd,btde->bte", s.q(x), state))


@network("2*10 2b*2", name="pairs of channels, read by a layer", held="share entries",
         a=(4, 5), c=(4, 5), o=(25, 2), inputs=(6, 4))  # fmt: skip
def pairs(s, x):
    return s.o(torch.einsum("bi,bj->bij", s.a(x), s.a(x)).flatten(1))


# ------------------------------------------------------------ graphs
def graph(nodes, edges):
    generator = torch.Generator().manual_seed(nodes)
    x = torch.randn(nodes, 4, generator=generator, dtype=torch.float64)
    return [x, torch.randint(nodes, (2, edges), generator=generator)]


edges = partial(network, a=(4, 6), b=(6, 5), c=(5, 2), inputs=graph(6, 11), shifts=None,
                others=[graph(9, 14), graph(3, 2)])  # fmt: skip
passing = partial(edges, "6 5", 11, 0)


def received(h, e, messages):
    return torch.zeros_like(h).index_add(0, e[1], messages)


def receivers(e):
    return e[1][:, None].expand(-1, 6)


@passing()
def graph_convolutions_by_edges(s, x, e):
    ones = torch.ones(e.shape[1], dtype=x.dtype)
    degree = torch.zeros(len(x), dtype=x.dtype).index_add(0, e[1], ones).clamp(min=1)
    size = (degree[e[0]] * degree[e[1]]).rsqrt()[:, None]
    h = s.a(x)
    h = torch.relu(received(h, e, h.index_select(0, e[0]) * size))
    messages = torch.zeros_like(h).scatter_add(0, receivers(e), h[e[0]] * size)
    return s.c(torch.relu(s.b(messages)))


@passing()
def graph_isomorphism(s, x, e):
    h = s.a(x)
    return s.c(torch.relu(s.b(torch.relu(1.5 * h + received(h, e, h[e[0]])))))


@passing(own=(6, 5))
def largest_messages(s, x, e):
    h = torch.relu(s.a(x))
    empty = torch.zeros_like(h)
    largest = empty.scatter_reduce(0, receivers(e), h[e[0]], "amax", include_self=False)
    return s.c(torch.relu(s.b(largest) + s.own(h)))


@network("5", 5, w=parameter(3, 4, 5), c=(5, 2), inputs=[*graph(6, 11), torch.arange(11) % 3])
def relations_with_matrices(s, x, e, kind):
    messages = torch.bmm(x[e[0]][:, None], s.w[kind])[:, 0]
    return s.c(torch.relu(torch.zeros(len(x), 5, dtype=x.dtype).index_add(0, e[1], messages)))


@edges("", c=(6, 2), others=[graph(6, 11)], held="gather")
def channels_picked_by_edges(s, x, e):
    return s.c(torch.relu(s.a(x)).gather(1, e[:1, :6].expand(len(x), -1) % 6))


words = torch.randint(9, (7,), generator=torch.Generator().manual_seed(0))
for mode in ("mean", "max"):
    network("5", 5, 0, name=f"bags with offsets, {mode}", c=(5, 2),
            inputs=[words, torch.tensor([0, 3, 5])],
            table=lambda m=mode: nn.EmbeddingBag(9, 5, mode=m),
            others=[[words, torch.tensor([0, 1, 4])]],
            )(lambda s, i, at: s.c(torch.relu(s.table(i, at))))  # fmt: skip

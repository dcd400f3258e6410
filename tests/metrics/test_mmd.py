"""MMD against the golden values of the released MMDAgg, brute force in numpy, and its own laws."""

import numpy as np
import pytest
import torch
from refusals import refuses
from scipy.spatial.distance import cdist

from lightning_bnn import metrics as M
from lightning_bnn.metrics import distances as D
from lightning_bnn.metrics.kernels import kernel_bandwidths
from lightning_bnn.metrics.remembered_mmd import StackSource


def golden(seed, draw):
    x, y = draw(np.random.RandomState(seed))
    return {"w": torch.from_numpy(x)}, {"w": torch.from_numpy(y)}


def first(rs):
    return rs.uniform(0, 1, (30, 5)), rs.uniform(0, 1, (20, 5)) + 0.5


def shared(rs):
    x = rs.normal(0, 1, (20, 3))
    return x, x[:10].copy()


GOLDEN = {  # released package, numpy version: median, mean, max, first and last bandwidths
    "uniform": (
        golden(0, first),
        (0.180232493227, 0.194749928165, 0.501919277482),
        (0.3097972647, 10.71574331, 0.1720254792, 4.895634589),
    ),
    "same size": (
        golden(1, lambda r: (r.normal(0, 1, (40, 8)), r.normal(0, 1.5, (40, 8)))),
        (0.0271410908144, 0.0312676689164, 0.0940664060399),
        (1.92650155, 47.705669, 0.8363569824, 19.41500941),
    ),
    "floors": (
        golden(2, lambda r: (r.normal(0, 0.005, (50, 64)), r.normal(0, 0.007, (10, 64)))),
        (0.011904779204, 0.0120454762858, 0.0507955751545),
        (0.1620940605, 1.123435489, 0.05, 0.6),
    ),
    "shared networks": (
        golden(4, shared),
        (-0.0647147769123, -0.0611749660409, -0.00543208208482),
        (0.1719433586, 15.26189601, 0.1448765006, 9.791706831),
    ),
    "capped": (
        golden(5, lambda r: (r.normal(0, 1, (600, 4)), r.normal(0.2, 1, (550, 4)))),
        (0.0049470911112, 0.00560932867578, 0.0162789584859),
        (0.0687369162672, 28.7349443039, 0.605353024503, 15.8859249156),
    ),
}


def bandwidths_of(x, y, name=None, grid=None):
    reference = M.MMDReference(x, grid)
    blocks = reference.blocks(name or reference.layers[0], StackSource(y))
    return kernel_bandwidths(blocks.xy, reference.grid)


@pytest.mark.parametrize("case", GOLDEN)
def test_golden_values(case):
    (x, y), expected, edges = GOLDEN[case]
    table = M.mmd_table(x, y)
    for reduction, value in zip(("median", "mean", "max"), expected, strict=True):
        assert table.reduce(reduction).item() == pytest.approx(value, abs=1e-10)
    found = bandwidths_of(x, y)[[0, 9, 10, 19]].tolist()
    assert found == pytest.approx(edges, rel=1e-9)


def layered():
    rs = np.random.RandomState(7)
    x, y = {}, {}
    for name, d, s in [("conv", 288, 0.05), ("bn", 32, 0.1), ("fc", 1000, 0.02)]:
        x[name] = torch.from_numpy(rs.normal(0, s, (60, d)))
        y[name] = torch.from_numpy(rs.normal(0, 1.1 * s, (12, d)))
    return x, y


# ------------------------------------------------------------ laws
def stacks(m=12, n=7, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    shapes = {"a.weight": (3, 4), "a.bias": (3,), "bn.running_mean": (5,)}
    x = {k: torch.randn(m, *s, generator=g, dtype=dtype) for k, s in shapes.items()}
    y = {k: 1.3 * torch.randn(n, *s, generator=g, dtype=dtype) for k, s in shapes.items()}
    return x, y


def test_brute_force():
    """Every kernel of every layer against scipy's distances and a double loop's definition."""
    x, y = stacks()
    table = M.mmd_table(x, y)
    assert table.layers == ("a.weight", "a.bias")  # no buffer
    for name, row in zip(table.layers, table.values, strict=True):
        a, b = x[name].flatten(1).numpy(), y[name].flatten(1).numpy()
        expected = []
        for metric, power in (("cityblock", 1), ("euclidean", 2)):
            xx, xy, yy = (cdist(*pair, metric) for pair in ((a, a), (a, b), (b, b)))
            low, high = xy.min() / 2, xy.max() * 2
            for width in np.geomspace(low, high, 10):
                kxx, kxy, kyy = (np.exp(-((d / width) ** power)) for d in (xx, xy, yy))
                off = [k[~np.eye(len(k), dtype=bool)].mean() for k in (kxx, kyy)]
                expected.append(sum(off) - 2 * kxy.mean())
        assert row.tolist() == pytest.approx(expected, abs=1e-13)


def test_scale_free_grid():
    (x, y), _, _ = GOLDEN["floors"]
    large = {"w": 100 * x["w"]}, {"w": 100 * y["w"]}
    assert M.mmd(x, y).item() == pytest.approx(0.01190, abs=1e-5)
    assert M.mmd(*large).item() == pytest.approx(0.01631, abs=1e-5)  # MMDAgg's absolute floors
    free = M.KernelGrid(min_distance=None, min_max_distance=None)
    assert M.mmd(x, y, grid=free).item() == pytest.approx(
        M.mmd(*large, grid=free).item(), abs=1e-12
    )


@pytest.mark.parametrize("grid", [M.KernelGrid(), M.KernelGrid(10, None, None)])
def test_equal_weights_have_no_distance(grid):
    frozen = {"w": torch.ones(5, 3)}, {"w": torch.ones(4, 3)}
    assert M.mmd(*frozen, grid=grid) == 0


def test_duplicates_are_reported(caplog):
    x, y = stacks()
    y = {k: torch.cat([v[:3], x[k][:2]]) for k, v in y.items()}
    M.mmd(x, y)
    assert "2 networks of `y` are also in `x`" in caplog.text


# ------------------------------------------------------------ streaming
class Sliced:
    """A source of its own kind, that notes how much it is asked for."""

    def __init__(self, params):
        self.params = {k: v.flatten(1) for k, v in params.items() if "running" not in k}
        self.rows = len(next(iter(self.params.values())))
        self.shapes = {k: params[k].shape[1:] for k in self.params}
        self.largest, self.calls = 0, 0

    def read(self, name, rows, columns):
        values = self.params[name][rows, columns]
        self.largest, self.calls = max(self.largest, values.numel()), self.calls + 1
        return values


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_chunks_do_not_matter(dtype):
    x, y = stacks(dtype=torch.float32)
    x, y = ({k: v.to(dtype) for k, v in s.items()} for s in (x, y))
    whole = M.mmd_table(
        {k: v.double() for k, v in x.items()}, {k: v.double() for k, v in y.items()}
    )
    a, b = Sliced(x), Sliced(y)
    pieces = M.mmd_table(a, b, memory=19 * 8 * 5)  # five features of nineteen networks
    torch.testing.assert_close(pieces.values, whole.values, atol=1e-6, rtol=0)
    assert a.largest == 5 * 12
    assert b.largest == 5 * 7


def test_reference_is_computed_once(monkeypatch):
    x, y = stacks()
    reference = M.MMDReference(x)
    first = M.mmd_table(reference, y)
    seen = []
    original = D._Sums.__init__

    def spy(self, rows, within_first, like):
        seen.append(within_first)
        original(self, rows, within_first, like)

    monkeypatch.setattr(D._Sums, "__init__", spy)
    again = M.mmd_table(reference, y)
    assert seen == [False, False]
    torch.testing.assert_close(first.values, again.values, atol=1e-14, rtol=0)


def test_transformed(tmp_path):
    """Rows transformed on the way, in blocks, in memory or on disk: as if transformed before."""
    x, y = stacks()
    order = torch.stack([torch.randperm(3) for _ in range(12)])

    def shuffle(name, values, rows):
        index = order[rows]
        return torch.stack([v[i] for v, i in zip(values, index, strict=True)])

    moved = {k: shuffle(k, v, slice(0, 12)) for k, v in x.items() if "running" not in k}
    expected = M.mmd_table(moved, y).values
    assert not torch.allclose(expected, M.mmd_table(x, y).values)
    for memory in (2**20, 64):
        source = M.Transformed(x, shuffle, memory=memory)
        torch.testing.assert_close(M.mmd_table(source, y).values, expected, atol=1e-15, rtol=0)


@pytest.mark.parametrize("rows_at_once", [1, 5, 12, 100])
def test_every_row_is_transformed_once(rows_at_once):
    """In blocks of as many rows as fit into a quarter of the memory."""
    seen = []

    def count(name, values, rows):
        seen.append(list(range(12))[rows])
        assert len(values) == len(seen[-1])
        return values

    source = M.Transformed({"w": torch.randn(12, 3)}, count, memory=4 * 3 * 4 * rows_at_once)
    source.read("w", slice(0, 12), slice(0, 3))
    source.read("w", slice(0, 12), slice(0, 1))
    assert sum(seen, []) == list(range(12))
    assert max(map(len, seen)) == min(rows_at_once, 12)


@pytest.mark.parametrize("spread", [1.0, 2e-2, 5e-4])
def test_networks_of_one_mode_in_float32(spread):
    """An uncentred Gram matrix in float32 has no correct digit here."""
    g = torch.Generator().manual_seed(0)
    centre = torch.randn(3000, generator=g)
    x, y = (centre + spread * torch.randn(n, 3000, generator=g) for n in (30, 20))
    free = M.KernelGrid(10, None, None)
    exact = M.mmd_table({"w": x.double()}, {"w": 1.001 * y.double()}, free).values
    found = M.mmd_table({"w": x}, {"w": (1.001 * y.double()).float()}, free).values
    assert (found - exact).abs().max() < 2e-3 * exact.abs().max()
    exact = D.distance_blocks([(x.double(), y.double())], (30, 20))
    for a, b in zip(exact, D.distance_blocks([(x, y)], (30, 20)), strict=True):
        for theirs, ours in ((a.l1, b.l1), (a.l2, b.l2)):
            assert ((theirs - ours).abs() / theirs.clamp_min(1e-9)).max() < 1e-6


def test_a_shared_network_and_a_grid_without_floors():
    """The distance of equal rows is zero, not what rounding leaves of it."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(20, 5000, generator=g)
    y = torch.cat([x[:1], torch.randn(9, 5000, generator=g)])
    widths = bandwidths_of({"w": x}, {"w": y}, grid=M.KernelGrid(10, None, None))
    assert 20 < widths[10] < 100


def test_function_space():
    """Predictions are compared as weights are, with any grid and of any type."""
    g = torch.Generator().manual_seed(0)
    x, y = (torch.rand(n, 11, 4, generator=g) for n in (9, 6))
    grid = M.KernelGrid(3, None, None)
    assert M.function_space_mmd(x, y, grid=grid) == M.mmd({"w": x}, {"w": y}, grid=grid)
    assert M.function_space_mmd(x, y, grid=grid) != M.function_space_mmd(x, y)
    half = x.bfloat16()
    found = M.function_space_mmd(half, y).item()
    assert found == pytest.approx(M.function_space_mmd(half.float(), y).item(), abs=1e-7)
    assert M.function_space_mmd(x[:, :0], y[:, :0]).isnan()


# ------------------------------------------------------------ distances
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("rows", [(19, 5), (40, 1), (1, 3), (7, 0), (0, 3), (33, 20)])
def test_distances_are_those_of_scipy(rows, known, dtype):
    """In chunks, and for a first set that is cut into pieces."""
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(n, 337, generator=g).to(dtype) for n in rows)
    chunks = [(x[:, :21], y[:, :21]), (x[:, 21:], y[:, 21:])]
    first = D.distance_blocks(chunks, rows)
    blocks = D.distance_blocks(chunks, rows, first.xx if known else None)
    assert (blocks.xx is first.xx) == known
    pairs = [(x, x), (x, y), (y, y)]
    for found, (a, b) in zip(blocks, pairs, strict=True):
        one, two = a.double().numpy(), b.double().numpy()
        for name, power, numbers in (("cityblock", 1, found.l1), ("euclidean", 2, found.l2)):
            expected = torch.from_numpy(cdist(one, two, name)) ** power
            tolerance = 1e-6 if dtype == torch.float32 else 1e-12
            torch.testing.assert_close(numbers, expected, rtol=tolerance, atol=1e-9)


# ------------------------------------------------------------ noise floor, test
def test_noise_floor():
    x, y = stacks(m=30)
    reference = M.MMDReference(x)
    floor = reference.noise_floor(repeats=4, samples=10)
    assert floor.shape == (4, 2, 20)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    parts = [{k: v[i] for k, v in x.items()} for i in (order[:20], order[20:])]
    torch.testing.assert_close(floor[0], M.mmd_table(*parts).values, atol=1e-13, rtol=0)
    assert floor.mean().abs() < M.mmd(reference, {k: v + 2 for k, v in y.items()})


# ------------------------------------------------------------ the class
def test_layers_in_parts():
    x, y = layered()
    metric = M.MMD("max")
    metric.update(x, y, layers=["fc"])
    metric.update(x, y, layers=["conv", "bn"])
    assert metric.compute().item() == pytest.approx(0.00584723714181, abs=1e-10)
    metric.update(x, y, layers=["fc"])  # once more: counts once
    assert metric.compute().item() == pytest.approx(0.00584723714181, abs=1e-10)
    metric.reset()
    metric.update(M.MMDReference(x), y)
    assert metric.compute().item() == pytest.approx(0.00584723714181, abs=1e-10)


def compared_with_others(x, y):
    metric = M.MMD()
    metric.update(x, y)
    metric.update(x, {k: 2 * v for k, v in y.items()})
    metric.compute()


test_errors = refuses(
    (compared_with_others, "compared twice with different weights"),
    (lambda x, y: M.mmd(x, y, "mode"), "`reduction` must be one of median, mean, max"),
    (lambda x, y: M.mmd(x, {"a.weight": y["a.weight"]}), "'a.bias' is in the networks of one"),
    (lambda x, y: M.mmd(x, {**y, "u": y["a.bias"]}), "'u' is in the networks of one side only"),
    (lambda x, y: M.mmd(M.MMDReference(x), {**y, "u": y["a.bias"]}), "'u' is in the networks"),
    (lambda x, y: M.mmd(x, y, layers=["c"]), "`layers` names 'c'"),
    (lambda x, y: M.mmd(x, {k: v[:1] for k, v in y.items()}), "`y` must hold at least 2"),
    (lambda x, y: M.mmd({k: v[:0] for k, v in x.items()}, y), "`x` must hold at least 2 .* got 0"),
    (lambda x, y: M.mmd(x, {k: v[:0] for k, v in y.items()}), "`y` must hold at least 2 .* got 0"),
    (lambda x, y: M.MMDReference({"w": torch.zeros(0, 2)}), "`x` must hold at least 2 .* got 0"),
    (lambda x, y: M.law_mmd(x, {k: v[:0] for k, v in y.items()}, None), "at least 1 .* got 0"),
    (lambda x, y: M.MMD().update({}, y), "is not a stack"),
    (lambda x, y: M.mmd(x, []), "must hold at least one network"),
    (lambda x, y: M.mmd(x, {k: v[..., :2] for k, v in y.items()}), "has shape"),
    (lambda x, y: M.mmd(x, {k: v / 0 for k, v in y.items()}), "'a.weight' holds NaN"),
    (lambda x, y: M.mmd(3, y), "Weights must be a stack"),
    (lambda x, y: M.mmd(M.MMDReference(x), y, grid=M.KernelGrid(5)), "has its own `grid`"),
    (lambda x, y: M.MMDReference(x, memory=0), "`memory` must be a number of bytes"),
    (lambda x, y: M.MMDReference(x).noise_floor(11), "`samples` must be in 2..10, got 11"),
    (lambda x, y: list(M.MMDReference(x).compare(y, ["z"])), "`layers` names 'z'"),
    (lambda x, y: M.KernelGrid(1), "`n_bandwidths` must be at least 2"),
    (lambda x, y: M.KernelGrid(max_samples=0), "`max_samples` must be at least 1"),
    (lambda x, y: M.mmd(M.MMDReference(x), y, memory=9), "has its own `grid` and options"),
    (lambda x, y: M.MMD(grid=M.KernelGrid(5)).update(M.MMDReference(x), y), "has its own"),
    (lambda x, y: M.function_space_mmd(torch.ones(3, 2).long(), torch.ones(2, 2)), "float"),
    (lambda x, y: M.function_space_mmd(torch.ones(3, 2), torch.ones(2, 3)), "same inputs"),
    (lambda x, y: M.function_space_mmd(torch.ones(3, 2), torch.ones(1, 2)), "at least 2"),
    (
        lambda x, y: M.function_space_mmd(torch.ones(3, 2), torch.full((2, 2), torch.nan)),
        "`y` must be finite",
    ),
    given=stacks,
)


def test_what_all_networks_share_is_no_weight():
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(20, 6, generator=generator) for _ in range(2))
    table, another = torch.randn(1000, generator=generator), torch.randn(20, 1000)
    shared = table.expand(20, -1)
    without = M.mmd({"w": x}, {"w": 3 * y})
    assert M.mmd({"w": x, "table": shared}, {"w": 3 * y, "table": shared}) == without
    assert M.mmd({"w": x, "table": shared}, {"w": 3 * y, "table": shared + 1}) != without
    assert M.mmd({"w": x, "table": shared}, {"w": 3 * y, "table": another}) != without
    assert M.mmd({"w": x, "table": shared}, {"w": y, "table": shared}, layers=["table"]) == 0

"""MMD between laws and of mixtures: against loops over networks, and on samples of known laws."""

import itertools

import numpy as np
import pytest
import torch
from refusals import refuses

from lightning_bnn import metrics as M
from lightning_bnn.metrics.kernels import Modes, kernel_bandwidths, kernel_values
from lightning_bnn.metrics.mmd import modes_table

CHAINS = [0, 0, 1, 1, 1, 2, 2, 3]
MODES = [5, 5, 5, 2, 9, 9, 7]


def draws(rows, dim=6, seed=0, shift=0.0):
    generator = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(rows, dim, generator=generator).double() + shift}


def brute_force(x, y, chains, modes, bandwidths):
    """Law and mixture by their definition, kernel by kernel."""
    reference = M.MMDReference(x)

    def kernel(a, b):
        distances = M.MMDReference({"w": torch.stack([a, b])}).blocks("w").xx
        return kernel_values(distances, bandwidths)[:, 0, 1].numpy()

    def mean(pairs):
        return np.mean([kernel(a, b) for a, b in pairs], 0)

    def grouped(stack, names):
        names = list(names)
        return [
            [r for r, n in zip(stack["w"], names, strict=True) if n == k]
            for k in sorted(set(names))
        ]

    of_x, of_y = grouped(x, chains), grouped(y, modes)
    between = {
        which: np.mean([mean(itertools.product(a, b)) for a, b in itertools.permutations(of, 2)], 0)
        for which, of in (("x", of_x), ("y", of_y))
    }
    across = np.mean([mean(itertools.product(a, b)) for a, b in itertools.product(of_x, of_y)], 0)
    within = [mean(itertools.permutations(a, 2)) if len(a) > 1 else np.ones(20) for a in of_y]
    count = len(of_y)
    to_reference = [np.mean([mean(itertools.product(a, b)) for a in of_x], 0) for b in of_y]
    mixed = ((count - 1) * between["y"] + np.mean(within, 0)) / count
    assert reference.source.rows == len(chains)
    return {
        "law": between["x"] + between["y"] - 2 * across,
        "mixture": between["x"] + mixed - 2 * across,
        "floor": (1 - between["x"]) / count,
        "single": between["x"] + np.array(within) - 2 * np.array(to_reference),
    }


def without(stack, names, part):
    keep = torch.tensor([n != part for n in names])
    return {"w": stack["w"][keep]}, [n for n in names if n != part]


def test_equals_loops_over_networks_also_without_each_mode_and_each_chain():
    x, y = draws(len(CHAINS)), draws(len(MODES), seed=1, shift=0.5)
    reference = M.MMDReference(x, chains=CHAINS)
    table = modes_table(reference, y, MODES)
    bandwidths = kernel_bandwidths(reference.blocks("w", reference.other(y)).xy, reference.grid)
    parts = [(x, CHAINS, y, MODES)]
    parts += [(x, CHAINS, *without(y, MODES, part)) for part in sorted(set(MODES))]
    parts += [(*without(x, CHAINS, part), y, MODES) for part in sorted(set(CHAINS))]
    assert table.law.left_out == (4, 4)
    assert Modes.of(MODES, 7).sizes.tolist() == [1, 3, 1, 2]
    for row, (a, chains, b, modes) in enumerate(parts):
        expected = brute_force(a, b, chains, modes, bandwidths)
        single = expected.pop("single")
        if row == 0:
            np.testing.assert_allclose(table.single.values[:, 0], single, rtol=1e-10, atol=1e-12)
        for name, values in expected.items():
            found = getattr(table, name).values[row, 0]
            np.testing.assert_allclose(found, values, rtol=1e-10, atol=1e-12)
    medians = table.law.reduce()
    left = [medians[1:5].numpy(), medians[5:].numpy()]  # without each mode, without each chain
    variance = sum(3 / 4 * np.square(part - part.mean()).sum() for part in left)
    assert table.law.estimate().error == pytest.approx(variance**0.5)


def test_one_mode_is_what_pooled_networks_are():
    x, y = draws(9), draws(6, seed=1)
    mixture, _ = M.mixture_mmd(x, y, [0] * 6)
    torch.testing.assert_close(mixture.value, M.mmd(x, y))
    assert M.law_mmd(x, y, [0] * 6).value.isnan()
    assert mixture.error.isnan()


@pytest.mark.parametrize("reduction", ["median", "mean", "max"])
def test_the_law_of_single_networks_is_the_pooled_number(reduction):
    x, y = draws(30), draws(12, seed=1, shift=0.3)
    law = M.law_mmd(x, y, None, reduction)
    torch.testing.assert_close(law.value, M.mmd(x, y, reduction))
    assert law.error > 0


def test_many_modes_are_left_out_in_parts():
    table = modes_table(draws(50), draws(90, seed=1), torch.arange(90) // 2)
    assert table.law.left_out == (20, 20)
    assert table.law.values.shape[0] == 41
    assert table.single.values.shape[0] == 45
    assert 0 < table.law.estimate().error < 0.1


def test_bandwidths_see_every_mode():
    """The grid looks at some rows only; the first of them may all be of one mode."""
    grid = M.KernelGrid(max_samples=4)
    x, y = draws(8), {"w": torch.cat([draws(8, seed=1)["w"], 50 + draws(8, seed=2)["w"]])}
    near, far = (
        M.law_mmd(x, z, [0] * 8 + [1] * 8, grid=grid).value for z in (y, {"w": y["w"].flip(0)})
    )
    torch.testing.assert_close(near, far, rtol=0.3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_chunks_change_nothing(monkeypatch, dtype):
    x, y = ({"w": s["w"].to(dtype)} for s in (draws(9), draws(7, seed=1)))
    expected = M.law_mmd(x, y, MODES)
    monkeypatch.setattr("lightning_bnn.metrics.kernels._CHUNK", 64)
    torch.testing.assert_close(M.law_mmd(x, y, MODES), expected)


test_refused_in_one_sentence = refuses(
    (lambda x, y: M.law_mmd(x, y, [0, 1]), "`modes` must be one whole number for each of 7"),
    (lambda x, y: M.law_mmd(x, y, torch.rand(7)), "`modes` must be one whole number"),
    (lambda x, y: M.law_mmd(x, y, ["a"] * 7), "`modes` must be whole numbers, got"),
    (lambda x, y: M.law_mmd(x, y, None, chains=[0] * 8), "`chains` must name at least two"),
    (lambda x, y: M.law_mmd(x, y, None, chains=[0]), "`chains` must be one whole number"),
    (lambda x, y: M.law_mmd(x, {"w": y["w"] * torch.nan}, None), "NaN or infinite"),
    given=lambda: (draws(8), draws(7, seed=1)),
)


@pytest.mark.parametrize("chains", [[0] * 4 + [1] * 4, [0, 0, 0, 0, 0, 1, 1, 1]])
def test_two_chains_have_no_error(chains):
    law = M.law_mmd(draws(8), draws(7, seed=1), MODES, chains=chains)
    assert law.value.isfinite()
    assert law.error.isnan()

"""The study of two ReLU units: the order of the numbers in its tables."""

import math

import pytest
import torch

from lightning_bnn.cli import main
from lightning_bnn.studies.tractable import posterior_density, study

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def results():
    torch.set_num_threads(1)
    found = study([0.05, 0.1], seeds=10, epochs=10, noise=1.5)
    return {(r.alpha, r.method): r for r in found}


@pytest.mark.e2e
def test_mean_field_lies_between_the_modes_and_symmetrized_on_one(results):
    one, two, exact = (
        results[0.05, m].apart for m in ("MFVI", "symmetrized, K=2", "symmetrized, exact")
    )
    assert one.mean() < 0.45 < two.mean() < exact.mean()
    assert exact.mean() == pytest.approx(1, abs=0.25)
    assert all(results[0.1, m].apart.mean() > 0.85 for _, m in results)


@pytest.mark.e2e
def test_table_3_symmetrized_elbos_are_higher(results):
    for result in results.values():
        assert (result.exact >= result.elbo).all()
        assert (result.exact - result.elbo <= math.log(2) / 100 + 1e-6).all()
        torch.testing.assert_close(result.drawn, result.exact, atol=2e-3, rtol=0)
    for alpha in (0.05, 0.1):
        mfvi, drawn, exact = (
            results[alpha, m].exact.mean()
            for m in ("MFVI", "symmetrized, K=2", "symmetrized, exact")
        )
        assert mfvi < drawn < exact + 1e-5


@pytest.mark.e2e
def test_table_2_errors(results):
    for alpha in (0.05, 0.1):
        assert results[alpha, "symmetrized, K=2"].mse.mean() < results[alpha, "MFVI"].mse.mean()


def test_the_modes_of_the_posterior_are_where_they_should_be():
    axis, density = posterior_density(0.2, 1.0)
    i, j = divmod(int(density.argmax()), len(axis))
    assert sorted([axis[i].item(), axis[j].item()]) == pytest.approx([-0.2, 0.2], abs=0.01)
    torch.testing.assert_close(density, density.T)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["tractable", "--out", "/proc/nothing"], "`out` must be a folder"),
        (["tractable", "--noise", "0"], "`noise` must be above 0"),
        (["tractable", "--alphas", "[-0.1]"], "`alphas` must be above 0"),
    ],
)
def test_bad_arguments(args, sentence, capsys):
    with pytest.raises(SystemExit) as end:
        main(args)
    assert end.value.code == 2
    assert sentence in capsys.readouterr().err

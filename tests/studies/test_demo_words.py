"""What the demo's page says is what its tables say, whatever the numbers are."""

import pytest

from lightning_bnn.studies.demo import GLOSSARY, on_chains, on_distances, on_pairs
from lightning_bnn.tables import Measured, Table

NAN = float("nan")


def laws(**values):
    rows = [[name, Measured(*value)] for name, value in values.items()]
    rows.append(["Noise, 5 networks", Measured(0.0, 0.1)])
    return Table("", ["method", "NS law"], rows)


def test_who_cannot_be_told_from_the_reference():
    said = on_distances(laws(A=(0.1, 0.2), B=(5.0, 0.3), C=(-0.1, 0.1)), "trained")
    assert "A and C cannot be told from the trained networks" in said
    assert "C is closest (-0.10), B farthest (5.00)" in said
    assert "Noise" not in said


def test_who_can_be_told_is_not_said_to_be_near():
    said = on_distances(laws(A=(1.0, 0.2), B=(5.0, 0.3)), "sampled")
    assert "every method can be told from the sampled networks" in said


def test_a_law_that_is_not_known_is_no_number():
    assert "every method has a single mode" in on_distances(laws(A=(NAN, NAN)), "trained")
    assert "B is closest (2.00), B farthest" in on_distances(laws(A=(NAN, 1.0), B=(2.0, 0.1)), "x")


@pytest.mark.parametrize(
    ("chains", "rhat", "said"),
    [
        (8, (1.005, 1.039), "Eight chains of Hamiltonian Monte Carlo sample the posterior itself"),
        (3, None, "Three chains of Hamiltonian Monte Carlo set out to sample"),
        (4, (1.2, 1.9), "do not agree yet (R-hat of predictions: 1.200 in the median"),
        (
            20,
            (1.0, 1.06),
            "20 chains of Hamiltonian Monte Carlo sample the posterior",
        ),
    ],
)
def test_chains_are_as_many_as_there_are_and_agree_only_if_they_do(chains, rhat, said):
    text = on_chains(chains, rhat)
    assert said in text
    agree = rhat is not None and rhat[0] < 1.01 and rhat[1] < 1.05
    assert ("and agree" in text) == agree
    assert ("too short" in text) == (rhat is None)


def pairs(low):
    rows = [
        ["in distribution", Measured(0.05, 0.01), low, 0.1, 0.0],
        ["scrambled", Measured(0.2, 0.05), 0.1, 0.4, 0.0],
    ]
    return Table("", ["nats", "mean ± sd", "min", "max", "skewness"], rows)


def test_pairs_that_differ_are_different_functions():
    said = on_pairs(pairs(0.02))
    assert said.startswith("Yes: no two of them are the same function")
    assert "by 0.0200 nats, which is 40 % of the mean over all pairs (0.0500" in said
    assert "4.0 times as much (0.2000 nats)" in said


@pytest.mark.parametrize("low", [0.0, 0.001])
def test_copies_are_not_said_to_be_different_functions(low):
    assert on_pairs(pairs(low)).startswith("Not all of them")


def test_networks_that_all_agree_are_one_function():
    rows = [[name, Measured(0.0, 0.0), 0.0, 0.0, NAN] for name in ("in distribution", "scrambled")]
    table = Table("", ["nats", "mean ± sd", "min", "max", "skewness"], rows)
    assert on_pairs(table).startswith("Not all of them")


def test_words_are_explained():
    assert all(len(meaning.split()) > 3 for meaning in GLOSSARY.values())

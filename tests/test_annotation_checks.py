"""The checks of annotations in the tests refuse what they would refuse without a short way."""

import beartype
import jaxtyping
import pytest
import torch
from annotation_checks import cheap
from jaxtyping import Float
from torch import Tensor

checked = cheap(jaxtyping.jaxtyped)(typechecker=beartype.beartype)


@checked
def repeated(x: "list[int]", times: int = 2) -> "list[int]":
    return x * times if times else "none"


@checked
def first(x: Float[Tensor, "n d"], y: Float[Tensor, "n d"] | None = None) -> Float[Tensor, " d"]:
    return x[0]


def test_what_fits_passes():
    assert repeated([1, 2]) == [1, 2, 1, 2]
    assert repeated(x=[1], times=3) == [1, 1, 1]
    assert first(torch.ones(2, 3), torch.ones(2, 3)).shape == (3,)


@pytest.mark.parametrize(
    "call",
    [
        lambda: repeated(["a"]),
        lambda: repeated([1], times=2.0),
        lambda: repeated([1], times=0),
        lambda: first(torch.ones(3)),
        lambda: first(torch.ones(2, 3), torch.ones(2, 4)),
    ],
)
def test_wrong_types_shapes_and_results_are_refused(call):
    with pytest.raises(Exception, match="violates|check error"):
        call()


def test_closures_are_checked_wherever_they_are_defined():
    def defined(limit):
        @checked
        def inner(x: int) -> int:
            return min(x, limit)

        return inner

    one, two = defined(1), defined(2)
    assert (one(5), two(5)) == (1, 2)
    for closure in (one, two):
        with pytest.raises(Exception, match="violates"):
            closure("5")

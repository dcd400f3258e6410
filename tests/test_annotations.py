"""The checks of `make test-all` refuse what annotations do not allow, also in closures."""

import pytest
import torch
from annotation_checks import cheap
from beartype import beartype
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Float, jaxtyped
from torch import Tensor

check = cheap(jaxtyped)(typechecker=beartype)


@check
def product(a: "Float[Tensor, 'n k']", b: Float[Tensor, "k m"], c: int = 0) -> Float[Tensor, "n m"]:
    return a @ b if c == 0 else b


def closure(out):
    @check
    def inner(a: Float[Tensor, " n"], *, b: int = 0) -> Float[Tensor, " n"]:
        return out

    return inner


@check
def counted(*numbers: int) -> list[int]:
    return list(numbers) if len(numbers) < 3 else numbers


@check
def doubled(x: Float[Tensor, " n"]) -> Float[Tensor, " m"]:
    return product(x[:, None], x[None].mT[:1])[:, 0]


A, B = torch.ones(2, 3), torch.ones(3, 4)
HOLDS = [lambda: product(A, B), lambda: closure(A[0])(A[0], b=1), lambda: closure(B[0])(B[0]),
         lambda: counted(1, 2), lambda: doubled(A[0]), lambda: doubled(B[0])]  # fmt: skip
FAILS = [lambda: product(A, A), lambda: product(A, B, c=1), lambda: product(A.int(), B),
         lambda: product(A, B, c="1"), lambda: closure(A[0])(B[0]), lambda: closure(3)(B[0]),
         lambda: closure(A[0])(A[0], b="1"), lambda: counted(1, "2"),
         lambda: counted(1, 2, 3)]  # fmt: skip


@pytest.mark.parametrize("call", HOLDS)
def test_what_annotations_allow_is_let_through(call):
    call()


@pytest.mark.parametrize("call", FAILS)
def test_what_annotations_do_not_allow_is_refused(call):
    with pytest.raises(BeartypeCallHintViolation):
        call()

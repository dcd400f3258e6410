"""Named tensors go wherever their module goes, under their names and as they are."""

import copy
import pickle

import pytest
import torch
from torch import nn

from lightning_bnn.named_tensors import NamedTensors

ODD = {
    "0.weight": torch.arange(6.0).view(2, 3),
    "tensor_2": torch.tensor([1, 2]),  # names that the buffers have, in another order
    "tensor_0": torch.ones(2, dtype=torch.float64),
    "": torch.zeros(0),
    "training": torch.tensor(True),
    "_device": torch.tensor(5.0),
}
KINDS = pytest.mark.parametrize("replaced", [False, True])


class Owner(nn.Module):
    def __init__(self, tensors, replaced=False):
        super().__init__()
        self.named, self.other = NamedTensors(tensors), nn.Linear(2, 2)
        if replaced:
            self.named.hold({name: t.clone() for name, t in tensors.items()})


def same(one, two):
    assert list(one) == list(two)
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], rtol=0, atol=0)
    return True


def changed(tensors):
    return {name: t + 1 if t.dtype != torch.bool else ~t for name, t in tensors.items()}


@KINDS
@pytest.mark.parametrize("tensors", [ODD, {}], ids=["odd", "none"])
def test_copies_pickles_and_checkpoints_have_the_same_tensors(tensors, replaced):
    owner = Owner(tensors, replaced)
    loaded = Owner(changed(tensors), replaced)
    loaded.load_state_dict(owner.state_dict())
    for other in (loaded, copy.deepcopy(owner), pickle.loads(pickle.dumps(owner))):
        assert same(other.named.tensors(), tensors)
        for tensor in other.named.tensors().values():
            tensor.zero_()
    assert same(owner.named.tensors(), tensors)
    assert {k for k in owner.state_dict() if k.startswith("named.")} == {
        f"named.{name}" for name in tensors
    }


@KINDS
def test_only_floating_tensors_change_their_type(replaced):
    tensors = Owner(ODD, replaced).half().named.tensors()
    kinds = [torch.half if t.is_floating_point() else t.dtype for t in ODD.values()]
    assert [t.dtype for t in tensors.values()] == kinds


def test_only_those_it_was_made_with_are_sent_between_processes():
    owner = Owner(ODD)
    assert len([t for t in owner.buffers() if t.numel()]) == len(ODD) - 1
    owner.named.hold(changed(ODD))
    assert sum(t.numel() for t in owner.buffers()) == 0
    assert same(owner.named.tensors(), changed(ODD))


def test_a_checkpoint_may_have_other_tensors_where_they_were_replaced():
    owner = Owner({})
    owner.load_state_dict(Owner(ODD).state_dict())
    assert same(owner.named.tensors(), ODD)
    owner.load_state_dict(Owner({}).state_dict())
    assert owner.named.tensors() == {}


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"a": 2}, "Missing key.*named.b"),
        ({"a": 2, "b": 1, "tensor_0": 2}, "Unexpected key.*named.tensor_0"),
        ({"a": 3, "b": 1}, "size mismatch"),
    ],
)
def test_checkpoints_that_do_not_fit(given, message):
    owner, other = (
        Owner({n: torch.ones(k) for n, k in sizes.items()}) for sizes in ({"a": 2, "b": 1}, given)
    )
    with pytest.raises(RuntimeError, match=message):
        owner.load_state_dict(other.state_dict())
    owner.named.hold({})  # in their place, a checkpoint may have others beside them
    if "Missing" in message:
        with pytest.raises(RuntimeError, match=message):
            owner.load_state_dict(other.state_dict())
    else:
        owner.load_state_dict(other.state_dict())

"""Loaders: every example once, keyed by (seed, epoch, position), resumable, shared by processes."""

import pytest
import torch

from lightning_bnn.datamodules import preprocessing as normalisation
from lightning_bnn.datamodules.base import TensorLoader
from lightning_bnn.datamodules.preprocessing import CropFlip, normalise


def loader(n=23, batch_size=4, **options):
    x = torch.arange(n)
    return TensorLoader(x, x + 100, batch_size, **options)


def draw(n, generator):
    return torch.rand(n, generator=generator)


def seen(batches):
    return torch.cat([batch.inputs for batch in batches]).tolist()


@pytest.mark.parametrize("training", [False, True])
def test_every_example_comes_once_with_its_target(training):
    batches = list(loader(training=training))
    assert sorted(seen(batches)) == list(range(23))
    assert len(batches) == len(loader()) == 6
    for batch in batches:
        assert torch.equal(batch.targets, batch.inputs + 100)


def test_order_depends_on_seed_and_epoch_only():
    one, other = loader(training=True), loader(training=True)
    torch.manual_seed(7)
    first = seen(one)
    torch.manual_seed(8)
    assert seen(other) == first != seen(loader(training=True, seed=1))
    one.set_epoch(1)
    assert seen(one) != first
    assert seen(loader()) == list(range(23))


def test_an_interrupted_epoch_goes_on_where_it_was():
    def run():
        source = loader(training=True, draw=draw)
        source.set_epoch(3)
        return source

    whole = list(run())
    source, iterator = run(), []
    for batch in source:
        iterator.append(batch)
        if len(iterator) == 2:
            break
    resumed = run()
    resumed.load_state_dict(source.state_dict())
    rest = list(resumed)
    assert seen([*iterator, *rest]) == seen(whole)
    assert torch.equal(torch.cat([b.draws for b in rest]), torch.cat([b.draws for b in whole[2:]]))
    for finished in (resumed, source):
        list(finished)
        resumed.load_state_dict(finished.state_dict())
        resumed.set_epoch(4)
        assert len(list(resumed)) == 6


@pytest.mark.parametrize("world", [2, 3, 5])
def test_processes_share_the_global_batch(world):
    whole = list(loader(n=30, batch_size=2 * world, training=True))
    parts = [
        list(loader(n=30, batch_size=2, training=True, rank=r, world_size=world))
        for r in range(world)
    ]
    for k, batch in enumerate(whole):
        assert sorted(seen([batch])) == sorted(sum((seen([part[k]]) for part in parts), []))


def test_processes_train_on_equally_many_and_are_judged_on_each_example_once():
    training = [loader(training=True, rank=r, world_size=4) for r in range(4)]
    assert len({len(seen(part)) for part in training}) == 1
    assert {k for part in training for k in seen(part)} == set(range(23))
    judged = [loader(rank=r, world_size=4) for r in range(4)]
    assert sorted(k for part in judged for k in seen(part)) == list(range(23))


def test_augmentation_differs_between_processes():
    one, two = (
        next(iter(loader(training=True, draw=draw, rank=r, world_size=2))).draws for r in range(2)
    )
    assert not torch.equal(one, two)


def test_crop_and_flip_against_slicing():
    images = torch.randint(256, (16, 3, 6, 7), dtype=torch.uint8)
    augment = CropFlip(2, flip=True)
    draws = augment.draw(16, torch.Generator().manual_seed(0))
    moved = augment(images, draws)
    padded = torch.nn.functional.pad(images, (2, 2, 2, 2))
    for image, (top, left, mirrored), found in zip(padded, draws.tolist(), moved, strict=True):
        wanted = image[:, top : top + 6, left : left + 7]
        assert torch.equal(wanted.flip(-1) if mirrored else wanted, found)
    assert set(draws[:, 2].tolist()) == {0, 1}
    assert draws[:, :2].min() == 0
    assert draws[:, :2].max() == 4
    assert (CropFlip(2).draw(50, torch.Generator().manual_seed(0))[:, 2] == 0).all()


# ------------------------------------------------------------ normalisation
MEAN, STD = (0.1, 0.5, 0.3), (0.2, 0.7, 1.5)


def written_out(inputs):
    numbers = inputs.to(torch.get_default_dtype()) / 255 if inputs.dtype == torch.uint8 else inputs
    mean, std = (torch.tensor(v, dtype=numbers.dtype)[:, None, None] for v in (MEAN, STD))
    return (numbers - mean) / std


@pytest.mark.parametrize("lead", [(), (1,), (7,), (3, 5), (0,), (2, 0)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_pieces_have_the_same_numbers(lead, dtype, monkeypatch):
    monkeypatch.setattr(normalisation, "AT_ONCE", 100)  # three images at most
    inputs = torch.randint(256, (*lead, 3, 4, 5)).to(dtype)
    given = inputs.clone()
    assert torch.equal(normalise(inputs, MEAN, STD), written_out(inputs))
    assert torch.equal(inputs, given)


def test_inputs_may_lie_across_each_other_in_memory(monkeypatch):
    monkeypatch.setattr(normalisation, "AT_ONCE", 100)
    inputs = torch.randint(256, (6, 4, 5, 3), dtype=torch.uint8).movedim(-1, 1)
    assert torch.equal(normalise(inputs, MEAN, STD), written_out(inputs))


def test_without_means_bytes_are_divided_and_numbers_stay():
    numbers = torch.randn(3, 2)
    assert normalise(numbers) is numbers
    assert torch.equal(normalise(torch.tensor([255, 0], dtype=torch.uint8)), torch.tensor([1.0, 0]))

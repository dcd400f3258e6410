"""What symmetrized VI does in steps: turns of layers, fresh noise, the constant of far units."""

import pytest
import torch
from module_cases import Blobs, adam, trainer
from torch import nn

from lightning_bnn.modules import MFVI, SymmetrizedVI

pytestmark = pytest.mark.filterwarnings("ignore")


def deep():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)
    )  # fmt: skip


def test_noise_is_fresh_in_every_step_of_every_epoch():
    module, noise = MFVI(deep(), optimizer=adam), []
    draw = module.method.draw

    def seen(state):
        drawn = draw(state)
        noise.append(drawn.noise.flatten()[:3].tolist())
        return drawn

    module.method.draw = seen
    trainer(max_epochs=2).fit(module, Blobs())
    assert len({tuple(row) for row in noise}) == len(noise) == 12


def test_far_units_leave_training_as_it_is():
    """The information is a constant then: weights are those of mean-field VI, bit for bit."""

    def weights(kind, **options):
        module = kind(deep(), init_std=1e-3, optimizer=adam, **options)
        trainer(max_epochs=2).fit(module, Blobs())
        return module.state.mean.detach(), module.state.log_std.detach()

    plain = weights(MFVI)
    for options in ({}, {"estimator": "capacity"}, {"estimator": "uniform", "draws": 5}):
        for a, b in zip(plain, weights(SymmetrizedVI, **options), strict=True):
            assert torch.equal(a, b)


def test_near_units_are_driven_apart():
    def weights(kind, **options):
        module = kind(deep(), init_std=0.7, prior_std=0.7, optimizer=adam, **options)
        trainer(max_epochs=10, limit_val_batches=0).fit(module, Blobs())
        module.example_input_array = torch.randn(2, 6)
        return module

    def interpolation(module):
        return module.method.bracket(module.state, module.run)["interpolation"]

    plain, ours = weights(MFVI), weights(SymmetrizedVI)
    other = SymmetrizedVI(deep(), num_data=60)
    other.example_input_array = torch.randn(2, 6)
    other.load_state_dict(plain.state_dict())
    assert interpolation(ours) < interpolation(other)


def test_the_bracket_is_logged():
    run = trainer(max_epochs=1)
    run.fit(SymmetrizedVI(deep(), init_std=0.5, optimizer=adam), Blobs())
    found = {k: float(v) for k, v in run.callback_metrics.items()}
    low, high = (found[f"val/permutation_info_{k}"] for k in ("lower", "upper"))
    assert 0 <= low <= high <= 7.9656 + 1e-3  # log(5! 4!)
    assert 0 < found["val/interpolation"] < 1
    assert found["train/sym_elbo"] >= found["train/elbo"]


def stepped(every, numbers, kind=SymmetrizedVI, **options):
    """Gradients and information of some steps from one start, each with noise of its own."""
    given = {"every": every} if kind is SymmetrizedVI else {}
    module = kind(deep(), num_data=60, **{"init_std": 0.5, **given, **options})
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)
    found = []
    for k in numbers:
        module.zero_grad()
        torch.manual_seed(k)
        terms = module.losses((x,), y, False, k)
        terms["loss"].sum().backward()
        information = terms.get("permutation_info", terms["nll"]).detach()
        found.append((module.state.mean.grad, module.state.log_std.grad, information))
    return found


@pytest.mark.parametrize("options", [{}, {"members": 2}, {"estimator": "capacity"}])
def test_a_gradient_that_is_held_is_that_of_the_step_before(options):
    """What a held step adds to mean-field VI is what the step that computed it has added."""
    ours = stepped(3, range(6), **options)
    for k in (3, 4, 5):
        assert torch.equal(ours[k][2], ours[3][2])
    assert not torch.equal(ours[0][2], ours[3][2])
    if not options:
        plain = stepped(3, range(6), MFVI)
        added = [[g - p for g, p in zip(ours[k][:2], plain[k][:2], strict=True)] for k in (3, 4)]
        for anew, held in zip(*added, strict=True):
            assert anew.abs().amax() > 1e-4
            torch.testing.assert_close(held, anew, rtol=1e-3, atol=1e-7)


def test_layers_take_turns_in_the_steps_that_compute_it():
    """Far units, log 5! and log 4!: a step that computes nothing is no turn."""
    found = [float(step[2]) for step in stepped(2, range(6), init_std=1e-3)]
    assert found == pytest.approx([4.787492] * 2 + [3.178054] * 2 + [4.787492] * 2, abs=1e-4)
    assert float(stepped(2, [3], init_std=1e-3)[0][2]) > 3  # nothing was held yet

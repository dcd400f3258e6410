"""SMILE: known moments with and without noise of gradients, energy errors, tuning, resume."""

import pytest
import torch
from scipy.integrate import solve_ivp
from torch import nn

from lightning_bnn.samplers import SMILE

D, N = 20, 50
SCALES = torch.logspace(-0.4, 0.4, D, dtype=torch.float64)
UNEVEN = 5 * torch.logspace(0.7, -0.7, D, dtype=torch.float64)
"""Deviations of gradients' noise, which are largest where the target is narrowest."""
UNTUNED = {"descent_steps": 0, "adapt_steps": 0}


def start(chains=256, numbers=D):
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(chains, numbers, generator=generator, dtype=torch.float64)
    return nn.Parameter(draws * SCALES[:numbers])


def run(sampler, theta, steps, noise=None, seed=1):
    """Second moments over the steps, and the mean, with noise of known deviations."""
    generator = torch.Generator().manual_seed(seed)
    first, second = 0, 0
    for _ in range(steps):
        theta.grad = theta.detach() / SCALES.to(theta) ** 2 / N
        if noise is not None:
            drawn = torch.randn(theta.shape, generator=generator, dtype=torch.float64)
            theta.grad += (noise * drawn / N).to(theta)
        sampler.step()
        x = theta.detach()
        first, second = first + x.mean(0) / steps, second + x.T @ x / len(x) / steps
    return first, second


def made(theta, lr=0.3, **options):
    group = {"params": [theta], "stacked": True, "precondition": options.pop("precondition", True)}
    return SMILE([group], lr, N, **{"descent_steps": 0, **options})


def ratios(noise, steps=800, **options):
    """Variances of draws over those of the target, and the sampler."""
    theta = start()
    sampler = made(theta, **options)
    run(sampler, theta, sampler.param_groups[0]["adapt_steps"] + 100, noise, seed=2)
    return run(sampler, theta, steps, noise)[1].diagonal() / SCALES**2, sampler


# ------------------------------------------------------------ the law of the draws


def test_preconditioning_removes_the_bias_of_noise_that_is_not_isotropic():
    found, sampler = ratios(UNEVEN, adapt_steps=700)
    assert ((found - 1).abs() < 0.08).all()
    length, size = sampler.lengths.mean().item(), sampler.step_sizes.mean().item()
    plain, _ = ratios(UNEVEN, lr=size, length=length, adapt_steps=0, precondition=False)
    assert (plain - 1).abs().max() > 1


def test_scales_are_inverse_to_the_noise_of_gradients():
    theta = start(64)
    sampler = made(theta, adapt_steps=400)
    run(sampler, theta, 400, 10 * UNEVEN)
    scales = sampler.state[theta]["scales"]
    torch.testing.assert_close(scales.square().mean(1), torch.ones(64, dtype=torch.float64))
    wanted = 1 / UNEVEN
    wanted = wanted / wanted.square().mean().sqrt()
    torch.testing.assert_close(
        (scales / wanted).mean(0), torch.ones_like(wanted), rtol=0.05, atol=0
    )
    assert not sampler.state[theta].keys() & {"last", "square", "mean", "deviation"}


def test_preconditioning_is_a_change_of_variables():
    """Of weights in units of their scales, whose gradients are multiplied by these."""
    scales, weights = torch.linspace(0.5, 2, D, dtype=torch.float64).expand(3, D), start(3)
    units = nn.Parameter(weights.detach() / scales)
    one, two = made(weights, **UNTUNED), made(units, **UNTUNED)
    one.state[weights]["scales"] = scales.clone()
    for _ in range(20):
        weights.grad = weights.detach() / SCALES**2 / N
        units.grad = scales * (scales * units.detach()) / SCALES**2 / N
        one.step()
        two.step()
    torch.testing.assert_close(weights, scales * units)
    torch.testing.assert_close(one.energy_variances, two.energy_variances)


# ------------------------------------------------------------ energy errors
def kinetic(direction, force, time):
    """What a constant force does to a direction, and to the kinetic energy, by scipy."""

    def change(_, y):
        u = y[:D]
        return [*(force - u * (u @ force)), (D - 1) * (u @ force)]

    end = solve_ivp(change, (0, time), [*direction, 0.0], rtol=1e-11, atol=1e-12).y[:, -1]
    return end[:D], end[D]


def test_the_energy_error_of_a_step_is_that_of_an_independent_computation():
    """Energies themselves, and both half kicks as differential equations."""
    theta, size = start(2), 0.7
    sampler = made(theta, size, **UNTUNED)
    before = theta.detach().clone()
    run(sampler, theta, 1)
    after, squares = theta.detach().clone(), []
    run(sampler, theta, 1)
    for x, y in zip(before, after, strict=True):
        u = ((y - x) / size).numpy()
        first = -kinetic(u, (x / SCALES**2 / (D - 1)).numpy(), size / 2)[1]  # back in time
        second = kinetic(u, (-y / SCALES**2 / (D - 1)).numpy(), size / 2)[1]
        potential = ((y / SCALES).square().sum() - (x / SCALES).square().sum()).item() / 2
        squares.append((potential + first + second) ** 2 / D)
    wanted = torch.tensor(squares, dtype=torch.float64)
    torch.testing.assert_close(sampler.energy_variances, wanted, rtol=1e-5, atol=0)
    assert (wanted > 1e-6).all()


# ------------------------------------------------------------ one chain beside others, resume
class Given(SMILE):
    """With the noise of some chains of a table."""

    rows = slice(None)

    def _noise(self, group, params, index):
        generator = torch.Generator().manual_seed(group["step"])
        return [torch.randn(2, D, generator=generator, dtype=torch.float64)[self.rows]]


def test_two_members_are_two_runs():
    """Given their noise, through all phases."""
    together = start(2)
    first = together.detach().clone()
    options = {"descent_steps": 5, "adapt_steps": 40}
    both = Given([{"params": [together], "stacked": True}], 0.3, N, **options)
    run(both, together, 70)
    for k in range(2):
        theta = nn.Parameter(first[k].clone())
        alone = Given([theta], 0.3, N, **options)
        alone.rows = k
        for _ in range(70):
            theta.grad = theta.detach() / SCALES**2 / N
            alone.step()
        torch.testing.assert_close(theta, together[k], rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(alone.lengths, both.lengths[k : k + 1])
    assert (both.lengths - D**0.5).abs().min() > 0.1


def test_a_chain_turns_around_where_the_energy_ends():
    """In a box without forces; another chain does not notice."""
    theta = nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
    sampler = made(theta, 0.1, length=1e9, **UNTUNED)
    places = []
    for _ in range(300):
        outside = (theta[:1].abs() > 1).any(1, keepdim=True)
        theta.grad = torch.zeros_like(theta)
        theta.grad[:1] += torch.where(outside, torch.nan, 0.0)
        sampler.step()
        places.append(theta.detach().clone())
    places = torch.stack(places)
    assert places.isfinite().all()
    assert 10 < sampler.failed_steps[0] < 50
    assert sampler.failed_steps[1] == 0
    assert places[:, 0].abs().max() < 1.2
    assert places[-1, 1].norm().item() == pytest.approx(30, rel=1e-4)


def test_without_a_temperature_steps_go_down_by_equal_lengths():
    theta = nn.Parameter(torch.tensor([3.0, 4.0, 0.0]))
    sampler = SMILE([theta], 0.5, N, temperature=0.0, **UNTUNED)
    for _ in range(3):
        theta.grad = theta.detach().clone()
        sampler.step()
    torch.testing.assert_close(theta.detach(), torch.tensor([2.1, 2.8, 0.0]))


# ------------------------------------------------------------ gradients of odd kinds
def test_weights_without_noise_do_not_stop_the_others():
    """And the user is told that the law of the others is too wide."""
    torch.manual_seed(0)
    chains, live = torch.nn.Parameter(torch.zeros(200, 20)), torch.ones(20)
    live[:12] = 0
    sampler = SMILE(
        [{"params": [chains], "stacked": True}], 0.01, 10_000, prior_precision=1.0,
        descent_steps=50, adapt_steps=600,
    )  # fmt: skip
    draws = []

    def run():
        for step in range(1500):
            chains.grad = live * (chains.detach() + 0.3 * torch.randn(200, 20))
            sampler.step()
            draws.extend([chains.detach().clone()] if step > 1000 else [])

    with pytest.warns(UserWarning, match="60 % of the weights have hardly any noise"):
        run()
    assert 0.5 < torch.stack(draws).var((0, 1))[12:].mean() * 10_001 < 3


def test_a_gradient_that_is_not_finite_is_left_out_in_every_phase():
    torch.manual_seed(0)
    chains = torch.nn.Parameter(torch.randn(3, 5))
    group = {"params": [chains], "stacked": True}
    sampler = SMILE([group], num_data=100, descent_steps=5, adapt_steps=5)
    for step in range(15):
        chains.grad = chains.detach().clone()
        if step in (2, 8, 12):
            chains.grad[1] = torch.nan
        sampler.step()
    assert chains.isfinite().all()


@pytest.mark.bad_input
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("descent", [0, 5])
def test_gradients_that_come_later_are_refused(late, descent):
    params = [torch.nn.Parameter(torch.randn(3, k)) for k in (4, 2)]
    group = {"params": params, "stacked": True}
    sampler = SMILE([group], num_data=10, descent_steps=descent, adapt_steps=5)
    params[1 - late].grad = torch.ones_like(params[1 - late])
    sampler.step()
    params[late].grad = torch.ones_like(params[late])
    with pytest.raises(ValueError, match="must have gradients at every step"):
        sampler.step()

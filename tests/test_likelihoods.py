"""Likelihoods and the prior against torch.distributions and scipy."""

import numpy as np
import pytest
import torch
from refusals import refuses
from scipy.stats import norm
from torch import distributions as D
from torch.nn import functional as F

from lightning_bnn.likelihoods import Bernoulli, Categorical, Gaussian, IsotropicGaussianPrior
from lightning_bnn.metrics import mutual_information


def test_categorical():
    z, y = torch.randn(3, 5, 4).double(), torch.randint(4, (5,))
    expected = D.Categorical(logits=z).log_prob(y)
    torch.testing.assert_close(Categorical().log_prob(z, y), expected)
    torch.testing.assert_close(Categorical().log_prob(z[0], y), expected[0])
    torch.testing.assert_close(Categorical().predictive(z), z.softmax(-1).mean(0))


def test_bernoulli_is_categorical_with_one_logit_at_zero():
    z, y = 5 * torch.randn(3, 6, 1).double(), torch.randint(2, (6,))
    both = torch.cat([torch.zeros_like(z), z], -1)
    torch.testing.assert_close(Bernoulli().log_prob(z, y), Categorical().log_prob(both, y))
    torch.testing.assert_close(Bernoulli().predictive(z), Categorical().predictive(both))
    assert Bernoulli().log_prob(torch.full((1, 1), -200.0), torch.tensor([1])) == -200


@pytest.mark.parametrize("noise", ["fixed", "learned", "heteroscedastic"])
def test_gaussian(noise):
    likelihood, y = Gaussian(noise, std=0.7, targets=2).double(), torch.randn(5, 2).double()
    outputs = torch.randn(3, 5, 4 if noise == "heteroscedastic" else 2).double()
    mean, std = outputs[..., :2], torch.tensor(0.7).double().expand(3, 5, 2)
    if noise == "heteroscedastic":
        std = outputs[..., 2:].exp().log1p() + 1e-3
    expected = norm(mean.numpy(), std.numpy()).logpdf(y.numpy()).sum(-1)
    np.testing.assert_allclose(likelihood.log_prob(outputs, y).detach(), expected, rtol=1e-6)
    step = 1e-6 * torch.randn_like(outputs)
    ends = (likelihood.log_prob(outputs + sign * step, y).detach().sum() for sign in (1, -1))
    slope = (likelihood.score(outputs, y) * step).sum()
    torch.testing.assert_close(2 * slope, next(ends) - next(ends), rtol=1e-4, atol=1e-12)
    trained = [p for p in likelihood.parameters() if p.requires_grad]
    assert len(trained) == (noise == "learned")
    prediction = likelihood.predictive(outputs)
    torch.testing.assert_close(prediction.mean, mean.mean(0))
    wanted = (mean.square() + std.square()).mean(0) - mean.mean(0).square()  # of the mixture
    torch.testing.assert_close(prediction.variance.detach(), wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize("stacked", [False, True])
def test_prior(stacked):
    lead = (3,) if stacked else ()
    params = {
        "w": torch.randn(*lead, 2, 4).double(),
        "s": torch.randn(lead).double(),
        "bn.running_mean": torch.randn(*lead, 4).double(),
    }
    found = IsotropicGaussianPrior(0.3).log_prob(params, stacked=stacked)
    flat = torch.cat([params["w"].reshape(*lead, -1), params["s"][..., None]], -1)
    torch.testing.assert_close(found, D.Normal(0.0, 0.3).log_prob(flat).sum(-1))
    alone = IsotropicGaussianPrior(0.3).log_prob(params, ["s"], stacked)
    torch.testing.assert_close(alone, D.Normal(0.0, 0.3).log_prob(params["s"]))


# ------------------------------------------------------------ several positions
@pytest.mark.parametrize("next_token", [False, True])
@pytest.mark.parametrize("ignore_index", [None, -100, 2])
@pytest.mark.parametrize("classes", ["last", "first"])
@pytest.mark.parametrize("positions", [(), (5,), (3, 2)])
def test_categorical_at_positions_is_cross_entropy(positions, classes, ignore_index, next_token):
    if next_token and len(positions) != 1:
        return
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 4, *positions, 3, generator=g)  # of two networks
    targets = torch.randint(3, (4, *positions), generator=g)
    if ignore_index == -100:
        targets = targets.where(torch.rand(targets.shape, generator=g) > 0.3, -100)
    likelihood = Categorical(classes, ignore_index, next_token)
    outputs = logits if classes == "last" or not positions else logits.movedim(-1, 2)
    seen, wanted = (logits[:, :, :-1], targets[:, 1:]) if next_token else (logits, targets)
    ignored = -1 if ignore_index is None else ignore_index
    each = [
        F.cross_entropy(z.movedim(-1, 1), wanted, reduction="none", ignore_index=ignored)
        for z in seen
    ]
    found = likelihood.log_prob(outputs, targets)
    wanted_logs = -torch.stack(each).view(2, 4, -1).sum(-1)
    torch.testing.assert_close(found, wanted_logs)
    rows, labels = likelihood.rows(outputs, targets)
    assert len(labels) == int((wanted != ignored).sum())
    total = F.cross_entropy(rows[1], labels, reduction="sum")
    torch.testing.assert_close(total, -found[1].sum())
    axis = 1 if classes == "first" and positions else -1
    sums = likelihood.predictive(outputs).sum(axis)
    torch.testing.assert_close(sums, torch.ones(4, *positions))
    if ignore_index == -100:  # where nothing counts, nothing changes
        other = outputs + 7 * torch.randn(outputs.shape, generator=g)
        none = likelihood.log_prob(other, torch.full_like(targets, -100))
        assert bool((none == 0).all())
        with pytest.raises(ValueError, match="must be in 0..2"):
            Categorical(classes, None, next_token).log_prob(outputs, targets)


NETWORKS, WORDS, LENGTH = 3, 3, 4
TEXTS = torch.cartesian_prod(*[torch.arange(WORDS)] * LENGTH)


def causal_outputs(generator):
    """Logits of networks that know all prefixes, ``(networks, texts, tokens, words)``."""
    tables = [
        2 * torch.randn(NETWORKS, WORDS**t, WORDS, generator=generator).double()
        for t in range(LENGTH)
    ]
    prefixes = [(TEXTS[:, :t] * WORDS ** torch.arange(t)).sum(1) for t in range(LENGTH)]
    return torch.stack([table[:, at] for table, at in zip(tables, prefixes, strict=True)], 2)


def test_sequences_are_those_of_a_mixture_of_networks_over_all_texts():
    logits = causal_outputs(torch.Generator().manual_seed(0))
    tokens = logits.log_softmax(-1).gather(-1, TEXTS.expand(NETWORKS, -1, -1)[..., None])[..., 0]
    of_each, scores = tokens.sum(-1).exp(), Categorical().sequences(logits, TEXTS)
    mixture, chance = of_each.mean(0), scores.log_prob.exp()
    torch.testing.assert_close(chance, mixture)
    assert chance.sum().item() == pytest.approx(1)
    product = tokens.exp().mean(0).prod(-1)  # of mean probabilities of tokens
    assert (product / mixture).log().abs().max() > 0.5
    information = torch.special.entr(mixture).sum() - torch.special.entr(of_each).sum(-1).mean()
    assert (mixture * scores.information).sum().item() == pytest.approx(information.item())
    alone = mutual_information(logits.flatten(1, 2).softmax(-1)).view(len(TEXTS), LENGTH).sum(-1)
    assert (mixture * alone).sum() > 1.1 * information  # without what the first tokens say
    pairs = [(a, b) for a in range(NETWORKS) for b in range(a)]
    guesses = logits.argmax(-1)
    differ = torch.stack([(guesses[a] != guesses[b]).any(-1) for a, b in pairs])
    torch.testing.assert_close(scores.disagreement, differ.double().mean(0))


def test_tokens_that_do_not_count_do_not_change_the_scores_of_a_sequence():
    g = torch.Generator().manual_seed(1)
    logits = causal_outputs(g)
    wanted = Categorical().sequences(logits, TEXTS)
    likelihood = Categorical(ignore_index=-100, next_token=True)
    first, last = (torch.randn(NETWORKS, len(TEXTS), 2, WORDS, generator=g) for _ in range(2))
    outputs = torch.cat([first[:, :, :1], logits, last], 2)  # padded, and of the next tokens
    ignored = torch.full((len(TEXTS), 2), -100)
    found = likelihood.sequences(outputs, torch.cat([ignored, TEXTS, ignored[:, :1]], 1))
    torch.testing.assert_close(found, wanted)
    assert found.tokens.unique().tolist() == [LENGTH]
    nothing = likelihood.sequences(outputs, torch.full((len(TEXTS), LENGTH + 3), -100))
    assert all(bool((score == 0).all()) for score in nothing)


def test_scores_of_images_and_of_examples_with_one_class():
    logits = causal_outputs(torch.Generator().manual_seed(2))
    wanted = Categorical().sequences(logits, TEXTS)
    images = logits.movedim(-1, 2).unflatten(-1, (2, 2))
    found = Categorical("first").sequences(images, TEXTS.view(-1, 2, 2))
    torch.testing.assert_close(found, wanted)
    one = Categorical().sequences(logits[:, :, 0], TEXTS[:, 0])
    torch.testing.assert_close(one.information, mutual_information(logits[:, :, 0].softmax(-1)))
    alone = Categorical().sequences(logits[:1], TEXTS)
    assert bool((alone.information.abs() < 1e-12).all() & (alone.disagreement == 0).all())


@pytest.mark.parametrize(
    ("likelihood", "outputs", "targets"),
    [
        (Categorical(), (5, 2), (5,)),
        (Categorical(ignore_index=1), (5, 3, 2), (5, 3)),
        (Categorical("first"), (5, 2, 3, 3), (5, 3, 3)),
        (Categorical(next_token=True), (5, 3, 2), (5, 3)),
        (Bernoulli(), (5, 1), (5,)),
    ],
)
def test_networks_with_targets_of_their_own_may_be_scored_at_once(likelihood, outputs, targets):
    g = torch.Generator().manual_seed(0)
    z, y = torch.randn(4, *outputs, generator=g), torch.randint(0, 2, (4, *targets), generator=g)
    wanted = torch.stack([likelihood.log_prob(*pair) for pair in zip(z, y, strict=True)])
    torch.testing.assert_close(torch.vmap(likelihood.log_prob)(z, y), wanted)


ONES = torch.ones
LONG = lambda *shape: torch.ones(shape).long()  # noqa: E731
test_errors = refuses(
    (lambda: Bernoulli().log_prob(ONES(3, 2), LONG(3)), "`outputs` must be one logit"),
    (lambda: Bernoulli().log_prob(ONES(3, 1), 2 * LONG(3)), "`targets` must be 0 or 1"),
    (lambda: Gaussian().log_prob(ONES(3, 1), ONES(3)), "`targets` must have shape"),
    (lambda: Gaussian("heteroscedastic").log_prob(ONES(3, 3), ONES(3, 1)), "got an odd number, 3"),
    (lambda: Categorical().log_prob(ONES(3, 2), ONES(3)), "3 class indices.*float32"),
    (lambda: Categorical().log_prob(ONES(3, 2), LONG(2)), r"3 class indices.*\(2,\)"),
    (lambda: Categorical().log_prob(ONES(3), torch.tensor(1)), r"for outputs \(3,\)"),
    (lambda: Categorical().log_prob(ONES(3), LONG(3)), r"outputs \(3,\)"),
    (lambda: Categorical().log_prob(ONES(1, 3), [1]), "`targets` must be a tensor"),
    (lambda: Bernoulli().log_prob(ONES(1, 1), None), "`targets` must be a tensor"),
    (lambda: Gaussian().log_prob(ONES(1, 1), ONES(1, 1).numpy()), "`targets` must be a tensor"),
    (
        lambda: Categorical().sequences(ONES(4, 5, 3), LONG(4, 5)),
        "must be those of several networks",
    ),
    (lambda: Categorical().sequences(ONES(2, 4, 5, 3), 3 * LONG(4, 5)), "must be in 0..2"),
    (lambda: Categorical().sequences(ONES(2, 0, 5, 3), LONG(0, 5)), "2 networks and 0 examples"),
    (lambda: Categorical().sequences(ONES(0, 4, 5, 3), LONG(4, 5)), "0 networks and 4 examples"),
    (lambda: Categorical("middle"), "`classes` must be 'last' or 'first'"),
    (lambda: Categorical().log_prob(ONES(4, 5, 3), LONG(4, 6)), r"last, got torch.int64 \(4, 6\)"),
    (lambda: Categorical("first").log_prob(ONES(4, 5, 3), LONG(4, 5)), "classes first"),
    (lambda: Categorical(next_token=True).log_prob(ONES(4, 3), LONG(4)), "`next_token` requires"),
)

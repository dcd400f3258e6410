"""A network that learns from a posterior: its optimum on a table of examples is exact."""

import lightning as L
import pytest
import torch
from module_cases import MODULES, Blobs, fitted, network, teacher
from runs import QUIET
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import metrics as M
from lightning_bnn.likelihoods import Bernoulli, Categorical, Dirichlet, Gaussian
from lightning_bnn.methods import Batch, Distillation, Run
from lightning_bnn.methods.distillation import Imitation, moments_of
from lightning_bnn.modules import MFVI
from lightning_bnn.modules import Distillation as DistillationModule
from lightning_bnn.predictions import Predictions
from weightsym import params as P

NETWORKS, EXAMPLES = 7, 5


class Teacher(nn.Module):
    """Networks that say given things."""

    device = torch.device("cpu")

    def __init__(self, likelihood, said):
        super().__init__()
        self.likelihood, self.said = likelihood, said

    def outputs(self, inputs, *batch):
        return self.said[:, inputs[0].long()]


def said_of(*shape, seed=0, scale=1.5):
    return scale * torch.randn(NETWORKS, EXAMPLES, *shape, generator=torch.manual_seed(seed))


def learned(likelihood, teacher, width, steps=600, **options):
    """A table with outputs for each example, which learns from a teacher without any limit."""
    torch.manual_seed(1)
    table, x = nn.Embedding(EXAMPLES, width), torch.arange(EXAMPLES)
    method, run = Distillation(teacher=teacher, **options), Run(table, likelihood)
    state = method.init(table, P.populate(table, 1))
    optimizer = torch.optim.LBFGS(state.parameters(), max_iter=steps, line_search_fn="strong_wolfe")
    batch = Batch((x,), torch.zeros(EXAMPLES))

    def closure():
        optimizer.zero_grad()
        loss = method.losses(state, batch, run)["loss"].sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return P.apply(table, state.stack(), x)


# ------------------------------------------------------------ optima
@pytest.mark.parametrize("student", [Categorical(), Dirichlet()])
def test_classes_have_the_mean_probabilities_of_the_teacher(student):
    teacher = Teacher(Categorical(), said_of(4))
    outputs = learned(student, teacher, 4)
    mean = teacher.said.softmax(-1).mean(0)
    torch.testing.assert_close(outputs[0].softmax(-1), mean, atol=2e-3, rtol=0)
    of_one = teacher.said[0].softmax(-1)
    assert (outputs[0].softmax(-1) - of_one).abs().max() > 0.1


def test_a_dirichlet_has_the_mutual_information_of_the_teacher():
    said = said_of(4) * torch.tensor([0.1, 0.5, 1.0, 2.0, 5.0])[:, None]  # from alike to at odds
    outputs = learned(Dirichlet(), Teacher(Categorical(), said), 4)
    wanted = M.mutual_information(said, from_logits=True)
    found = Predictions.of(Dirichlet(), outputs).scores()["mutual_information"]
    torch.testing.assert_close(found.float(), wanted, atol=2e-3, rtol=2e-2)
    assert wanted.max() > 10 * wanted.min()
    plain = Predictions.of(Categorical(), outputs).scores()["mutual_information"]
    assert plain.max() < 1e-6  # one network agrees with itself


def test_a_gaussian_has_the_moments_of_the_teacher():
    teacher = Teacher(Gaussian("heteroscedastic"), said_of(4))
    student = Gaussian("heteroscedastic")
    mean, std = student.moments(learned(student, teacher, 4)[0])
    wanted = teacher.likelihood.predictive(teacher.said)
    torch.testing.assert_close(mean, wanted.mean, atol=5e-3, rtol=0)
    torch.testing.assert_close(std, wanted.variance.sqrt(), atol=5e-3, rtol=0)
    assert (std - wanted.noise.sqrt()).min() > 0.1  # disagreement is part of the variance


def test_one_logit_has_the_mean_probability_of_the_teacher():
    teacher = Teacher(Bernoulli(), said_of(1))
    outputs = learned(Bernoulli(), teacher, 1)
    torch.testing.assert_close(
        outputs[0].sigmoid(), teacher.said.sigmoid().mean(0), atol=2e-3, rtol=0
    )


def test_softened_softmaxes_are_matched_at_their_temperature():
    teacher = Teacher(Categorical(), said_of(4))
    outputs = learned(Categorical(), teacher, 4, softening=3.0)[0]
    wanted = (teacher.said / 3).softmax(-1).mean(0)
    torch.testing.assert_close((outputs / 3).softmax(-1), wanted, atol=2e-3, rtol=0)
    assert (outputs.softmax(-1) - teacher.said.softmax(-1).mean(0)).abs().max() > 0.01


def test_a_linear_posterior_is_distilled_to_its_predictive_distribution():
    """Of Bayesian linear regression, which is a Gaussian process, in closed form."""
    g = torch.Generator().manual_seed(0)
    x, noise = torch.randn(EXAMPLES, 2, generator=g).double(), 0.3
    design = torch.randn(12, 2, generator=g).double()
    y = design @ torch.tensor([1.0, -2.0]).double() + noise * torch.randn(12, generator=g).double()
    covariance = torch.linalg.inv(torch.eye(2) + design.mT @ design / noise**2)
    centre = covariance @ design.mT @ y / noise**2
    law = torch.distributions.MultivariateNormal(centre, covariance)
    torch.manual_seed(0)
    said = (law.sample((20_000,)) @ x.mT)[..., None].float()
    student = Gaussian("heteroscedastic")
    found = learned(student, Teacher(Gaussian(std=noise), said), 2)[0]
    mean, std = student.moments(found)
    exact = ((x @ covariance) * x).sum(-1) + noise**2
    torch.testing.assert_close(mean[:, 0].double(), x @ centre, atol=0.01, rtol=0)
    torch.testing.assert_close(std[:, 0].double(), exact.sqrt(), atol=0.01, rtol=0)


# ------------------------------------------------------------ losses
LIKELIHOODS = [
    (Categorical(), Categorical(), (4,), (4,)),
    (Categorical("first"), Categorical("first"), (3, 2, 2), (3, 2, 2)),
    (Bernoulli(), Bernoulli(), (1,), (1,)),
    (Gaussian("heteroscedastic"), Gaussian(std=0.7), (2,), (4,)),
    (Gaussian("learned", targets=2), Gaussian("heteroscedastic"), (4,), (2,)),
]


def targets_of(teacher, outputs, n, generator):
    """Targets that a teacher's networks draw, ``(n, networks, examples, ...)``."""
    if isinstance(teacher, Gaussian):
        mean, std = teacher.moments(outputs)
        return mean + std * torch.randn(n, *mean.shape, generator=generator)
    if isinstance(teacher, Bernoulli):
        return torch.bernoulli(outputs[..., 0].sigmoid().expand(n, -1, -1), generator=generator)
    logits = outputs if teacher.classes == "last" else outputs.movedim(2, -1)
    torch.manual_seed(5)
    return torch.distributions.Categorical(logits=logits).sample((n,))


@pytest.mark.parametrize(("student", "teacher", "said", "width"), LIKELIHOODS)
def test_the_loss_is_the_mean_over_targets_that_the_teacher_draws(student, teacher, said, width):
    outputs, of_student = said_of(*said), said_of(*width, seed=3)[:1]
    found = Imitation(student, 1.0).log_prob(of_student, moments_of(teacher, outputs))[0]
    g = torch.Generator().manual_seed(2)
    drawn = targets_of(teacher, outputs, 300, g)
    each = torch.stack([student.log_prob(of_student, y)[0] for y in drawn.flatten(0, 1)])
    error = each.std(0) / len(each) ** 0.5
    assert ((found - each.mean(0)).abs() < 5 * error).all()


def test_the_entropy_of_a_dirichlet_is_that_of_its_draws():
    outputs = said_of(3, scale=2.0)
    torch.manual_seed(0)
    draws = Dirichlet().draws(outputs, 20_000).reshape(20_000, NETWORKS, EXAMPLES, 3)
    wanted = torch.special.entr(draws.softmax(-1)).sum(-1).mean(0)
    torch.testing.assert_close(Dirichlet().class_entropy(outputs), wanted, atol=0.01, rtol=0)
    each = draws[:, 0]
    found = Predictions.of(Dirichlet(), outputs[:1]).scores()["mutual_information"]
    wanted = M.mutual_information(each, from_logits=True)
    torch.testing.assert_close(found.float(), wanted, atol=0.01, rtol=0)


# ------------------------------------------------------------ runs
class Unlabelled(L.LightningDataModule):
    """Inputs alone: as tensors, as tuples of one, or beside labels that are wrong."""

    def __init__(self, layout):
        super().__init__()
        self.layout = layout

    def train_dataloader(self):
        data = Blobs()
        data.setup("fit")
        x = torch.cat([b[0] for b in data.train_dataloader()]).repeat(5, 1)
        if self.layout == "tensor":
            return DataLoader(x, 20)
        labels = [torch.zeros(len(x)).long()] if self.layout == "wrong labels" else []
        return DataLoader(TensorDataset(x, *labels), 20)


def taught(layout, epochs):
    torch.manual_seed(4)
    student = DistillationModule(
        network(width=16), teacher=teacher(), likelihood=Dirichlet(),
        optimizer=lambda p: torch.optim.Adam(p, 0.03),
    )  # fmt: skip
    L.Trainer(**{**QUIET, "max_epochs": epochs}).fit(student, Unlabelled(layout))
    return student


def test_labels_are_not_read():
    """All layouts train alike, and one of them until the student knows what its teacher does."""
    few = [P.ravel(P.of(taught(layout, 1)))[0] for layout in ("tensor", "tuple", "wrong labels")]
    assert torch.equal(few[0], few[1])
    assert torch.equal(few[0], few[2])
    ensemble, student = teacher(), taught("tensor", 30)
    x = Blobs().load().train[0]
    assert (student(x) - ensemble(x)).abs().mean() < 0.05
    scores = [
        Predictions.of(m.likelihood, m.outputs((x,))).scores()["mutual_information"]
        for m in (student, ensemble)
    ]
    assert torch.corrcoef(torch.stack(scores))[0, 1] > 0.6


def test_a_checkpoint_needs_no_teacher(tmp_path):
    student = MODULES["distilled"](network())
    run = fitted(student)
    run.save_checkpoint(tmp_path / "student.ckpt")
    again = DistillationModule.load_from_checkpoint(
        tmp_path / "student.ckpt", network=network(), weights_only=True
    )
    x = torch.randn(9, 6)
    assert torch.equal(again(x), student(x))
    with pytest.raises(ValueError, match="`teacher` is missing"):
        fitted(again)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"teacher": nn.Linear(2, 2)}, "`teacher` must be a fitted module"),
        ({"softening": 0.0}, "`softening` must be positive"),
    ],
)
def test_what_cannot_teach_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        DistillationModule(network(), **options)


@pytest.mark.parametrize(
    ("likelihood", "softening", "words"),
    [
        (Gaussian(), 1.0, "cannot learn from a teacher with Categorical"),
        (Dirichlet(), 2.0, "`softening` applies to Categorical"),
    ],
)
def test_students_of_another_kind_are_refused(likelihood, softening, words):
    student = DistillationModule(
        network(), teacher=teacher(), likelihood=likelihood, softening=softening
    )
    with pytest.raises(ValueError, match=words):
        fitted(student)


def test_labels_do_not_train_concentrations():
    with pytest.raises(ValueError, match="Labels do not determine"):
        MFVI(network(), likelihood=Dirichlet())

"""Every verdict is given where its fault was put in, and not where it was not.

Networks are so simple that what they predict is known: logits are the inputs times a weight, and
labels are drawn from the softmax of the inputs, so that a weight of one is calibrated.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_bnn.doctor import Evidence, Examples, Finding, Report, Settings, examine
from lightning_bnn.doctor.checks import weights
from lightning_bnn.doctor.checks.predictions import draws_alike
from lightning_bnn.doctor.evidence import NotPossible
from lightning_bnn.doctor.examine import CHECKS
from lightning_bnn.likelihoods import Bernoulli, Categorical, Gaussian
from lightning_bnn.models import mlp
from lightning_bnn.posteriors import DiagonalGaussian, Empirical
from weightsym import params as P

CLASSES, EXAMPLES = 3, 2000


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def labelled(seed=0, n=EXAMPLES, shift=0):
    """Inputs that are logits, and labels drawn from their softmax."""
    x = 2 * torch.randn(n, CLASSES, generator=generator(seed))
    return Examples(
        (x,), torch.multinomial(x.softmax(-1), 1, generator=generator(seed))[:, 0] + shift
    )


def measured(seed=0, n=EXAMPLES, noise=0.5):
    """One number in, one number out, and noise of a known size."""
    x = torch.randn(n, 1, generator=generator(seed))
    return Examples((x,), x + noise * torch.randn(n, 1, generator=generator(seed + 100)))


def scaled(*factors, size=CLASSES):
    """A stack of networks that multiply their inputs by a number."""
    eye = torch.eye(size)
    return {"weight": torch.stack([f * eye for f in factors])}


def modes(*stacks):
    return [Empirical(stack) for stack in stacks]


def evidence(*stacks, **changes):
    """Of networks that multiply; healthy unless something is changed."""
    found = modes(*(stacks or (scaled(1.0), scaled(1.01), scaled(0.99))))
    settings = changes.pop("settings", Settings(num_data=EXAMPLES, seen=EXAMPLES))
    whole = Evidence(
        nn.Linear(CLASSES, CLASSES, bias=False), Categorical(), found, found, labelled(1),
        labelled(2), settings, {"loss": [2.0, 1.5, 1.2, 1.01, 1.0, 1.0, 1.01, 1.0]},
    )  # fmt: skip
    return replace(whole, **changes)


def numbers(*factors, std=0.5, **changes):
    """The same for one number."""
    found = modes(*(scaled(f, size=1) for f in factors or (1.0, 1.01)))
    changes = {"training": measured(1), "held_out": measured(2), **changes}
    return replace(
        evidence(), network=nn.Linear(1, 1, bias=False), likelihood=Gaussian(std=std),
        modes=found, predictors=found, **changes,
    )  # fmt: skip


def chained(starts=(1.0, 1.0, 1.0), drift=0.0, spread=0.05, times=60, copies=False, stuck=False):
    """Chains of weights around their starts."""
    rows = []
    for k, start in enumerate(starts):
        noise = spread * torch.randn(times, generator=generator(k))
        if stuck:
            noise = noise.view(-1, 5)[:, :1].expand(-1, 5).reshape(-1)
        rows.append(start + noise + drift * torch.linspace(-1, 0, times))
    values = torch.stack(rows)
    chains = {"weight": values[..., None, None] * torch.eye(CLASSES)}
    stacks = [{n: t[k] for n, t in chains.items()} for k in range(len(starts))]
    settings = Settings(EXAMPLES, EXAMPLES, sampled=True, wanted_energy_variance=5e-4)
    return evidence(*stacks, chains=chains, settings=settings)


def copied():
    """Chains of one function whose units are in different orders."""
    net = mlp(CLASSES, [4], CLASSES)
    first, bias, second, last = (t.detach() for t in P.of(net).values())
    g, stacks = generator(), []
    for _ in range(3):
        order = torch.randperm(4, generator=g)
        moved = zip(P.of(net), (first[order], bias[order], second[:, order], last), strict=True)
        stacks.append({n: t + 1e-3 * torch.randn(30, *t.shape, generator=g) for n, t in moved})
    chains = {n: torch.stack([s[n] for s in stacks]) for n in stacks[0]}
    settings = Settings(EXAMPLES, EXAMPLES, sampled=True)
    return replace(evidence(*stacks, chains=chains, settings=settings), network=net)


def regression(factor=1.0, prior_std=1.0, n=200, noise=0.5, **settings):
    """A mean-field posterior of a linear regression, whose deviations are known in closed form."""
    x = torch.randn(n, 20, generator=generator())
    w = torch.randn(20, generator=generator(1))
    y = x @ w[:, None] + noise * torch.randn(n, 1, generator=generator(2))
    std = (x.square().sum(0) / noise**2 + prior_std**-2).rsqrt()
    gaussian = DiagonalGaussian({"weight": w[None]}, {"weight": factor * std[None]})
    told = Settings(n, n, prior_std=prior_std)
    return replace(
        evidence(), network=nn.Linear(20, 1, bias=False), likelihood=Gaussian(std=noise),
        modes=[gaussian], predictors=[gaussian], training=Examples((x,), y),
        held_out=Examples((x,), y),
        settings=replace(told, **settings),
    )  # fmt: skip


def as_prior(share=1.0, std=1.0):
    """A Gaussian that is the prior but for a part of its weights."""
    learned = int(20 * (1 - share))
    mean, stds = torch.zeros(1, 20), torch.full((1, 20), std)
    mean[:, :learned], stds[:, :learned] = 3.0, 0.01
    gaussian = DiagonalGaussian({"weight": mean}, {"weight": stds})
    return replace(regression(prior_std=std), modes=[gaussian], predictors=[gaussian])


def with_curve(name, *values, **settings):
    base = Settings(EXAMPLES, EXAMPLES, sampled=True, wanted_energy_variance=5e-4)
    return evidence(curves={name: list(values)}, settings=replace(base, **settings))


def normed(own=True):
    """A network with BatchNorm, whose statistics are those of the inputs or are not."""
    net = nn.Sequential(nn.BatchNorm1d(CLASSES), nn.Linear(CLASSES, CLASSES, bias=False)).eval()
    shift = torch.tensor([10.0, -5.0, 3.0])
    x, y = labelled(1)
    moved = [Examples((labelled(k).inputs[0] + shift,), labelled(k).targets) for k in (1, 2)]
    state = {n: t.detach().clone() for n, t in P.of(net).items()}
    state["1.weight"] = 2 * torch.eye(CLASSES)
    if own:
        state["0.running_mean"], state["0.running_var"] = (x[0] + shift).mean(0), x[0].var(0)
    found = modes({n: t[None] for n, t in state.items()})
    return replace(
        evidence(), network=net, modes=found, predictors=found, training=moved[0], held_out=moved[1]
    )


def squashed():
    """Outputs that are probabilities."""
    found = modes({"0.weight": scaled(1.0)["weight"]})
    network = nn.Sequential(nn.Linear(CLASSES, CLASSES, bias=False), nn.Softmax(-1))
    return replace(evidence(), network=network, modes=found, predictors=found)


FAULTY = {
    "labels_out_of_range": [
        ("fault", lambda: evidence(training=labelled(shift=1))),
        ("warning", lambda: evidence(
            training=Examples(labelled().inputs, labelled().targets.clamp_min(1))
        )),
    ],
    "probabilities_as_logits": [("fault", lambda: squashed())],
    "not_standardised": [
        ("warning", lambda: numbers(
            training=Examples(measured().inputs, 1000 * measured().targets)
        )),
        ("warning", lambda: evidence(
            training=Examples((255 * labelled().inputs[0],), labelled().targets)
        )),
    ],
    "not_the_posterior_of_bayes": [
        ("fault", lambda: evidence(settings=Settings(num_data=64, seen=EXAMPLES))),
        ("warning", lambda: evidence(settings=Settings(kl_weight=0.1))),
        ("warning", lambda: evidence(settings=Settings(temperature=2.0))),
        ("warning", lambda: evidence(settings=Settings(prior_std=1.0, weight_decay=0.01))),
    ],
    "loss_not_converged": [
        ("fault", lambda: evidence(curves={"loss": [1.0, 0.5, float("nan")]})),
        ("warning", lambda: evidence(curves={"loss": [3 - 0.1 * k for k in range(20)]})),
    ],
    "wrong_deviations": [
        ("fault", lambda: regression(0.1)),
        ("fault", lambda: regression(10.0)),
    ],
    "prior_dominates": [
        ("warning", lambda: as_prior(0.95)),
        ("fault", lambda: replace(
            regression(),
            settings=Settings(200, 200, prior_std=1e-3),
            predictors=modes({"weight": torch.zeros(1, 1, 20)}),
        )),
    ],
    "step_too_large": [
        ("fault", lambda: with_curve("acceptance", 0.9, 0.2, 0.1)),
        ("warning", lambda: with_curve("energy_variance", 4e-4, 4e-2)),
    ],
    "not_burnt_in": [("fault", lambda: chained(drift=1.5))],
    "chains_not_converged": [
        ("fault", lambda: chained((1.0, 1.5, 1.0))),
        ("warning", lambda: chained(times=12)),
    ],
    "chains_are_copies": [("note", lambda: copied())],
    "draws_alike": [
        ("fault", lambda: evidence(scaled(1.0, 1.0, 1.0001))),
        ("fault", lambda: chained(stuck=True)),
        ("fault", lambda: evidence(scaled(1.0), scaled(1.0), scaled(1.3))),
    ],
    "members_diverged": [
        ("fault", lambda: evidence(scaled(1.0), scaled(1.1), scaled(-2.0), scaled(0.9))),
    ],
    "modes_too_few": [("warning", lambda: numbers(0.2, 1.8))],
    "no_better_than_frequencies": [("fault", lambda: evidence(scaled(0.0)))],
    "miscalibrated": [
        ("warning", lambda: evidence(scaled(3.0))),
        ("warning", lambda: evidence(scaled(0.4))),
    ],
    "statistics_of_other_networks": [("fault", lambda: normed(own=False))],
}  # fmt: skip
"""Evidence with every fault that a verdict names, and how severe it is."""
CASES = [(name, *case) for name, cases in FAULTY.items() for case in cases]
NOISE = 0.02 * torch.randn(40, generator=generator())
FLAT = (torch.exp(-torch.arange(40.0)) + 1 + NOISE).tolist()
HEALTHY = {
    "loss_not_converged": lambda: evidence(curves={"loss": FLAT}),
    "not_standardised": numbers,
    "wrong_deviations": regression,
    "prior_dominates": lambda: as_prior(0.5),
    "step_too_large": lambda: with_curve("acceptance", 0.2, 0.8, 0.9, 0.85),
    "not_burnt_in": chained,
    "chains_not_converged": lambda: chained(times=300),
    "chains_are_copies": chained,
    "draws_alike": lambda: evidence(scaled(1.0, 1.1)),
    "statistics_of_other_networks": normed,
}


@pytest.mark.parametrize(("verdict", "severity", "made"), CASES)
def test_a_fault_is_found(verdict, severity, made):
    finding = CHECKS[verdict](made())
    assert finding is not None
    assert finding.severity == severity
    assert all(text.endswith(".") for text in (finding.says, finding.why, finding.fix))
    assert finding.numbers


@pytest.mark.parametrize("verdict", CHECKS)
def test_what_is_healthy_is_left_alone(verdict):
    assert FAULTY[verdict]
    assert CHECKS[verdict](HEALTHY.get(verdict, evidence)()) is None


@pytest.mark.parametrize("factor", [0.01, 0.5, 1.0, 7.0])
def test_deviations_are_compared_with_those_in_closed_form(factor):
    ratios = weights._ratios(regression(factor))
    torch.testing.assert_close(ratios, torch.full_like(ratios, factor), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("made", "temperature"),
    [
        *((lambda f=f: evidence(scaled(f)), f) for f in (0.5, 1.7, 3.0)),
        *((lambda std=std: numbers(1.0, std=std), 0.5 / std) for std in (0.1, 2.0)),
    ],
)
def test_the_temperature_is_the_one_that_was_put_in(made, temperature):
    assert CHECKS["miscalibrated"](numbers(1.0)) is None  # the control
    found = CHECKS["miscalibrated"](made())
    assert ("too sure" in found.says) == (temperature > 1)
    assert found.numbers["temperature"] == pytest.approx(temperature, rel=0.15)


@pytest.mark.parametrize(
    ("curve", "values", "settings", "bad"),
    [
        ("kinetic_temperature", (5.0, 1.0, 1.1), {}, False),
        ("kinetic_temperature", (1.0, 2.0, 2.1), {}, True),
        ("kinetic_temperature", (1.0, 2.0, 2.1), {"temperature": 2.0}, False),
        ("energy_variance", (4e-4, 5e-4), {}, False),
        ("energy_variance", (4e-4, 5e-2), {}, True),
        ("kinetic_temperature", (1.0, float("inf"), float("inf")), {}, True),
    ],
)
def test_samplers_are_judged_by_the_second_half_of_what_was_seen(curve, values, settings, bad):
    found = CHECKS["step_too_large"](with_curve(curve, *values, **settings))
    assert (found is not None) == bad


def test_a_single_logit_has_two_classes():
    found = modes({"weight": torch.tensor([[[-1.0, 0.5, 0.5]]])})
    examples = Examples(labelled().inputs, labelled().targets.clamp_max(1))
    single = replace(
        evidence(), network=nn.Linear(CLASSES, 1, bias=False), likelihood=Bernoulli(),
        modes=found, predictors=found, training=examples, held_out=examples,
    )  # fmt: skip
    report = examine(single)
    assert "labels_out_of_range" in report.fine
    assert "no_better_than_frequencies" in report.fine


# ------------------------------------------------------------ the examination
def test_everything_is_looked_at_or_said_why_not():
    shown = evidence()
    shown.network.train()
    before = torch.random.get_rng_state()
    report = examine(shown)
    assert {*report.fine, *report.names(), *report.skipped} == CHECKS.keys()
    assert not report.findings
    assert "no chains" in report.skipped["not_burnt_in"]
    assert shown.network.training  # left in its mode, and random numbers as they were
    assert torch.equal(torch.random.get_rng_state(), before)
    empty = replace(shown, training=None, held_out=None, settings=Settings(), curves={})
    report = examine(empty)
    assert not report.findings
    assert "no validation data" in report.skipped["miscalibrated"]


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_broken_member_is_named_and_stops_nothing(broken):
    report = examine(evidence(scaled(1.0), scaled(broken), scaled(1.1)))
    assert {f.name for f in report.faults} == {"members_diverged"}
    assert "number 1" in report.findings[0].says


def test_faults_come_first_and_consequences_are_not_said():
    report = examine(chained((1.0, 1.5, 1.0), stuck=True))
    assert [f.severity for f in report.findings] == sorted(
        (f.severity for f in report.findings), key=["fault", "warning", "note"].index
    )
    assert "draws_alike" in report.names()
    assert "chains_not_converged" not in report.names()


def test_the_steps_that_a_norm_counts_hide_no_chain_that_stands():
    stuck = chained(stuck=True)
    chains, draws = next(iter(stuck.chains.values())).shape[:2]
    counter = torch.arange(draws).expand(chains, -1)
    counted = replace(stuck, chains={**stuck.chains, "norm.num_batches_tracked": counter})
    assert draws_alike(counted) == draws_alike(stuck) is not None
    assert draws_alike(chained()) is None


def test_what_cannot_be_seen_is_not_possible():
    class TwoOutputs(nn.Linear):
        def forward(self, x):
            return super().forward(x), x

    two = TwoOutputs(CLASSES, CLASSES, bias=False)
    with pytest.raises(NotPossible, match="one tensor"):
        _ = replace(evidence(), network=two).on_held_out


@pytest.mark.parametrize("factor", [1.0, 3.0])
@pytest.mark.parametrize(
    "likelihood",
    [
        Categorical(ignore_index=-100),
        Categorical(ignore_index=-100, next_token=True),
        Categorical("first", ignore_index=-100),
    ],
)
def test_texts_and_images_are_examined_at_one_position_that_counts(likelihood, factor):
    plain, first = labelled(3), likelihood.classes == "first"
    counts = torch.rand(EXAMPLES, 4, generator=generator(4)) > 0.5
    counts[0] = False  # an example without any is left out
    wrong = torch.randn(EXAMPLES, 4, CLASSES, generator=generator(5))
    x = wrong.where(~counts[..., None], plain.inputs[0][:, None])
    y = plain.targets[:, None].where(counts, -100)
    if likelihood.next_token:
        x, y = torch.cat([x, wrong[:, :1]], 1), torch.cat([torch.full((EXAMPLES, 1), -100), y], 1)
    examples = Examples((x.mT if first else x,), y)
    weights = [scaled(factor * f)["weight"] for f in (1.0, 1.01, 0.99)]
    found = modes(*({"weight": w[..., None] if first else w} for w in weights))
    net = nn.Conv1d(3, 3, 1, bias=False) if first else nn.Linear(3, 3, bias=False)
    whole = Evidence(net, likelihood, found, found, examples, examples)
    one = whole.at_one_position()
    rows = counts.any(1)
    assert torch.equal(one.held_out.targets, plain.targets[rows])
    torch.testing.assert_close(one.on_held_out[0][0].float(), factor * plain.inputs[0][rows])
    assert one.at_one_position() is one
    assert ("miscalibrated" in examine(whole).names()) == (factor > 1)


# ------------------------------------------------------------ reports
FAULT = Finding("fault", "It is 3 <b>.", "That is bad.", "Halve it.", {"x": 3.0}, "step_too_large")
NOTE = Finding("note", "They are.", "Nothing is wrong.", "Nothing.", {}, "chains_are_copies")
REPORT = Report(
    [FAULT, NOTE], ["miscalibrated"], {"not_burnt_in": "there are no chains"},
    {"place": "run", "seconds": 0.5}, {"loss": [1.0, math.nan, math.inf]},
)  # fmt: skip


def test_a_report_that_was_written_is_read_as_it_was(tmp_path):
    path = REPORT.write(tmp_path / "new")
    assert path.name == "doctor.json"
    again = Report.read(path)
    assert again.findings == REPORT.findings
    assert (again.fine, again.skipped, again.facts) == (REPORT.fine, REPORT.skipped, REPORT.facts)
    assert again.curves["loss"][0] == 1.0
    assert math.isnan(again.curves["loss"][1])
    assert math.isnan(again.curves["loss"][2])


def test_text_and_markdown_say_the_same():
    parts = (
        "1 fault (step too large), 1 note",
        "It is 3 <b>.",
        "That is bad.",
        "Halve it.",
        "They are.",
    )
    for shown in (REPORT.text(), REPORT.markdown()):
        assert all(part in shown for part in parts)
        assert "miscalibrated" in shown.lower()


def test_nothing_found_is_said():
    skipped = {"not_burnt_in": "no chains", "draws_alike": "no data", "miscalibrated": "no data"}
    for report, said in (
        (Report([], ["miscalibrated"]), "nothing found"),
        (Report([]), "nothing could be looked at"),
        (Report([], ["labels_out_of_range"], skipped),
         "only 1 of 4 checks possible (no data); they found nothing"),
        (Report([FAULT, FAULT]), "2 faults"),
    ):  # fmt: skip
        assert report.headline().startswith(said)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"findings": [{}], "curves": {}}', '{"findings": [], "curves": {"loss": 3}}',
     '{"findings": [], "curves": {}, "other": 1}', '{"findings": 3, "curves": {}}', "\0"],
)  # fmt: skip
def test_a_damaged_report_is_refused_in_a_sentence(content, tmp_path):
    path = tmp_path / "doctor.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"doctor.json is not a report of the doctor"):
        Report.read(path)

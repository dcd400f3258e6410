"""The doctor in runs: of every kind of module of ours, and of modules as users write them."""

import dataclasses
import functools
import json
import tempfile
from functools import partial

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from module_cases import (
    MODULES,
    OF_EACH_CLASS,
    WITHOUT_N,
    Blobs,
    adam,
    made,
    network,
    trainer,
)  # fmt: skip
from processes import on_devices
from runs import Plain, Points
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader

from lightning_bnn import samplers
from lightning_bnn.callbacks import PosteriorDoctor
from lightning_bnn.callbacks.run_evidence import _likelihood
from lightning_bnn.doctor import Report
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.modules import DeepEnsemble

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("undrawn")]


def looked(module, folder, data=None, epochs=3, val=None, **options):
    """What the doctor says of a short run."""
    doctor = PosteriorDoctor(**options.pop("doctor", {}))
    run = trainer(doctor, max_epochs=epochs, default_root_dir=folder, **options)
    run.fit(module, Blobs() if data is None else data, val)
    return doctor


@pytest.mark.parametrize(
    "kind",
    ["ensemble", "mfvi", "bethe", "sghmc", "multi-swag", "dropout", "multi-laplace", "hmc", "mile"],
)
def test_modules_of_every_kind_are_examined(kind, tmp_path):
    torch.manual_seed(0)
    doctor = looked(MODULES[kind](network(dropout=0.2)), tmp_path)
    report = doctor.report
    assert report.facts["held-out examples"] == 25
    assert report.facts["training examples seen"] > 0
    assert {"miscalibrated", "no_better_than_frequencies"} & {
        *report.fine,
        *report.names(),
        *report.skipped,
    }
    assert Report.read(tmp_path / "doctor.json").findings == report.findings


# ------------------------------------------------------------ what was asked for
BAYES = [name for name in OF_EACH_CLASS if name != "multi-ivon"]  # whose temperature is 0.5


def sampling(cls, **options):
    return {"optimizer": partial(cls, **options)}


COLD = sampling(samplers.SGHMC, lr=0.05, temperature=0.5)
DEPARTURES = {
    "mfvi weight": ("multi-mfvi", {"kl_weight": 0.1}, "the weight of the KL term is 0.1"),
    "mfvi": ("multi-mfvi", {"temperature": 0.25}, "temperature is 0.25"),
    "symmetrized vi weight": ("bethe", {"kl_weight": 3.0}, "the weight of the KL term is 3"),
    "symmetrized vi": ("bethe", {"temperature": 2.0}, "temperature is 2"),
    "a warm-up that has not ended": ("mfvi", {"kl_warmup": 6}, "weight of the KL term is 0.5"),
    "ivon": ("multi-ivon", {"temperature": 0.125}, "temperature is 0.125"),
    "ivon by its optimizer": (
        "ivon", sampling(samplers.IVON, lr=0.1, temperature=0.5), "temperature is 0.5",
    ),
    "laplace": ("multi-laplace", {"temperature": 0.1}, "temperature is 0.1"),
    "sghmc": ("sghmc", COLD, "temperature is 0.5"),
    "smile": (
        "smile",
        sampling(samplers.SMILE, descent_steps=2, adapt_steps=4, temperature=0.5),
        "temperature is 0.5",
    ),
    "hmc": (
        "hmc",
        sampling(samplers.HMC, step_size=0.03, leapfrog_steps=3, adapt_steps=3, temperature=0.5),
        "temperature is 0.5",
    ),
    "mile": (
        "mile",
        sampling(samplers.MCLMC, steps=1, descent_steps=1, adapt_steps=2, temperature=2.0),
        "temperature is 2",
    ),
    "a colder cycle": (
        "sghmc", {**COLD, "lr_scheduler": partial(samplers.CyclicalSchedule, cycle_length=6)},
        "temperature is 0.5",
    ),
    **{
        f"decay of {name}": (
            name,
            {"prior_std": 1.0, "optimizer": partial(torch.optim.Adam, lr=0.03, weight_decay=0.01)},
            "weight decay of 0.01 beside a prior",
        )
        for name in ("ensemble", "multi-swag", "multi-dropout", "laplace", "multi-mfvi", "bethe")
    },
    **{
        f"examples of {name}": (name, {"num_data": 600}, "assumes 600 training examples")
        for name in BAYES if name not in WITHOUT_N
    },
}  # fmt: skip


@pytest.mark.parametrize("case", DEPARTURES)
def test_every_departure_from_bayes_is_named(case, tmp_path):
    name, options, words = DEPARTURES[case]
    report = looked(made(name, **options), tmp_path, limit_val_batches=0).report
    (finding,) = (f for f in report.findings if f.name == "not_the_posterior_of_bayes")
    assert words in finding.says[0].lower() + finding.says[1:]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in BAYES),
        ("sghmc", {"lr_scheduler": partial(samplers.CyclicalSchedule, cycle_length=6)}),
        ("mfvi", {"kl_warmup": 2}),
        ("multi-ivon", {"temperature": 1.0}),
    ],
)
def test_the_posterior_of_bayes_is_fine(name, options, tmp_path):
    """Also where a schedule ends in exploration, at temperature 0."""
    report = looked(made(name, **options), tmp_path, limit_val_batches=0).report
    assert "not_the_posterior_of_bayes" in report.fine


@pytest.mark.parametrize("name", ["mfvi", "bethe"])
def test_a_kl_term_counts_as_often_as_the_objective_counts_it(name, tmp_path):
    """A hundred times the KL term keeps the data out; once, it does not."""
    doctors = [
        looked(made(name, kl_weight=w, init_std=0.1), tmp_path, epochs=15, limit_val_batches=0)
        for w in (1.0, 100.0)
    ]
    faults = [{f.name: f.numbers for f in doctor.report.faults} for doctor in doctors]
    assert "prior_dominates" not in faults[0]
    assert faults[1]["prior_dominates"]["share"] > 0.5


def test_curves_of_samplers_are_means_over_chains(tmp_path):
    """Of one epoch, after which the sampler is as it was seen."""
    torch.manual_seed(0)
    doctor, module = PosteriorDoctor(), MODULES["hmc"](network())
    run = trainer(doctor, max_epochs=3, default_root_dir=tmp_path)
    run.fit(module, Blobs())
    acceptance = run.optimizers[0].acceptance
    assert acceptance.shape == (2,)
    assert doctor.curves["acceptance"][-1] == pytest.approx(float(acceptance.double().mean()))


@pytest.mark.parametrize("members", [1, 3])
def test_a_module_of_the_user_is_seen_as_one_network(members, tmp_path):
    """Its loss is that of one of its members."""

    class Sum(Plain):
        def training_step(self, batch, index):
            return 6 + 0 * super().training_step(batch, index)

    module = Sum()
    module.members = members
    data = L.LightningDataModule.from_datasets(Points(200), Points(100), batch_size=20)
    doctor = looked(module, tmp_path, data)
    assert doctor.curves["loss"] == [6 / members] * 3
    assert "no_better_than_frequencies" in {*doctor.report.fine, *doctor.report.names()}
    assert "there is only one network" in doctor.report.skipped["draws_alike"]


# ------------------------------------------------------------ how batches and outputs look
class Sure(nn.Module):
    """Classes of which no input says anything, by a network that is sure of them.

    It keeps what it returns, which has a history.
    """

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x, labels=None, shape=lambda z: z, scale=1.0, like_transformers=False):
        z = self.last = scale * self.layers(x)
        if not like_transformers:
            return shape(z)
        return Outputs({} if labels is None else {"loss": entropy(z, labels)}, logits=z)


class Outputs(dict):
    """As transformers have them."""

    __getattr__ = dict.__getitem__


class Layout(L.LightningModule):
    def __init__(self, layout, manual=False):
        super().__init__()
        self.net, self.layout, self.automatic_optimization = Sure(), layout, not manual

    def loader(self, seed):
        x, y = torch.randn(200, 2, generator=torch.Generator().manual_seed(seed)), Y[seed]
        return DataLoader([self.layout[0](*pair) for pair in zip(x, y, strict=True)], 20)

    def train_dataloader(self):
        return self.loader(0)

    def val_dataloader(self):
        return self.loader(1)

    def training_step(self, batch, _):
        loss = self.layout[1](self.net, batch)
        if self.automatic_optimization:
            return loss
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        return self.optimizers().step()

    def validation_step(self, batch, _):
        self.layout[1](self.net, batch)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.1)


Y = torch.randint(3, (2, 200), generator=torch.Generator().manual_seed(2))
entropy = nn.functional.cross_entropy


LAYOUTS = {
    "a tuple": (lambda x, y: (x, y), lambda net, b: entropy(net(b[0]), b[1])),
    "names": (lambda x, y: {"x": x, "y": y}, lambda net, b: entropy(net(b["x"]), b["y"])),
    "other names": (
        lambda x, y: {"kind": y, "place": x}, lambda net, b: entropy(net(b["place"]), b["kind"]),
    ),
    "labels that the network is given": (
        lambda x, y: {"x": x, "labels": y}, lambda net, b: net(**b, like_transformers=True).loss,
    ),
    "a tuple inside a tuple": (
        lambda x, y: ((x, x + 1), y), lambda net, b: entropy(net(b[0][0]), b[1]),
    ),
    "inputs that the step prepares": (
        lambda x, y: {"x": x[None] / 2, "y": y},
        lambda net, b: entropy(net(2 * b["x"].flatten(1)), b["y"]),
    ),
    "several outputs": (
        lambda x, y: (x, y),
        lambda net, b: entropy(net(b[0], shape=lambda z: (z.sum(), {"head": z}))[1]["head"], b[1]),
    ),
    "an option": (lambda x, y: (x, y), lambda net, b: entropy(net(b[0], scale=1.0), b[1])),
    "numbers beside the targets": (
        lambda x, y: (x, torch.rand(()), y), lambda net, b: entropy(net(b[0]), b[2]),
    ),
}  # fmt: skip


@functools.cache
def report_on(name, manual):
    torch.manual_seed(0)
    module = Layout(LAYOUTS[name], manual)
    with tempfile.TemporaryDirectory() as folder:
        return looked(module, folder, module.loader(0), 6, val=module.loader(1)).report


@pytest.mark.parametrize(
    ("name", "manual"), [*((name, False) for name in LAYOUTS), ("names", True)]
)
def test_the_findings_are_the_same_for_every_layout(name, manual):
    plain, other = report_on("a tuple", manual), report_on(name, manual)
    assert plain.findings  # there is something to be found
    assert [f.says for f in other.findings] == [f.says for f in plain.findings]
    assert (other.fine, other.skipped) == (plain.fine, plain.skipped)


UNCLEAR = {
    "nothing but inputs": (
        lambda x, y: {"x": x}, lambda net, b: net(b["x"]).square().mean(),
        "batch that holds targets",
    ),
    "two that may be targets": (
        lambda x, y: {"x": x, "a": y, "b": y}, lambda net, b: entropy(net(b["x"]), b["a"]),
        "b, a: call one of them labels or targets",
    ),
    "sequences": (
        lambda x, y: (x.expand(4, 2), y.expand(4)),
        lambda net, b: entropy(net(b[0]).mT, b[1]), "outputs are not (batch, numbers)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNCLEAR)
def test_what_cannot_be_read_is_said_and_stops_nothing(name, tmp_path):
    *layout, reason = UNCLEAR[name]
    module = Layout(layout)
    report = looked(module, tmp_path, module.loader(0), 5, val=module.loader(1)).report
    assert reason in report.skipped["miscalibrated"]
    assert report.findings or report.headline().startswith("only 2 of 17 checks possible (")
    assert "loss_not_converged" in {*report.fine, *report.names()}  # of any run


@pytest.mark.parametrize("every", [1, 4])
def test_accumulated_gradients_leave_the_loss_as_it_is(every, tmp_path):
    module = Layout(LAYOUTS["a tuple"])
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), 0.0)
    doctor = looked(module, tmp_path, module.loader(0), accumulate_grad_batches=every)
    with torch.no_grad():
        loss = sum(LAYOUTS["a tuple"][1](module.net, b) for b in module.loader(0)) / 10
    assert doctor.curves["loss"] == pytest.approx([float(loss)] * 3)


def test_a_run_that_breaks_off_is_explained(tmp_path):
    class Shifted(Blobs):
        def load(self):
            x, y = super().load().train
            return dataclasses.replace(super().load(), train=(x, y + 1))

    with pytest.raises(ValueError, match="`labels` must be in"):
        looked(DeepEnsemble(network(), members=2, optimizer=adam), tmp_path, Shifted())
    report = Report.read(tmp_path / "doctor.json")
    assert "labels_out_of_range" in {f.name for f in report.findings}


def test_all_members_lost_is_a_fault_and_no_crash(tmp_path):
    def wild(parameters):
        return torch.optim.SGD(parameters, lr=1e30)

    module = DeepEnsemble(network(), members=2, optimizer=wild)
    doctor = looked(module, tmp_path, epochs=2, limit_val_batches=0)
    assert doctor.report.names() == {"no_posterior"}


def test_it_looks_as_often_as_it_is_told(tmp_path, monkeypatch):
    looks, look = [], PosteriorDoctor.look

    def counted(doctor, trainer, module):
        looks.append(trainer.current_epoch)
        look(doctor, trainer, module)

    monkeypatch.setattr(PosteriorDoctor, "look", counted)
    module = DeepEnsemble(network(), members=2, optimizer=adam)
    looked(module, tmp_path, epochs=5, doctor={"every_n_epochs": 2})
    assert looks == [1, 3, 5]


def test_tensorboard_has_text_and_numbers_and_the_folder_a_report(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    looked(DeepEnsemble(network(), members=2, optimizer=adam), tmp_path, logger=logger)
    tags = EventAccumulator(logger.log_dir).Reload().Tags()
    assert {"doctor/faults", "doctor/warnings"} <= set(tags["scalars"])
    assert "doctor/text_summary" in tags["tensors"]
    (report,) = tmp_path.rglob("doctor.json")
    content = json.loads(report.read_text(), parse_constant=pytest.fail)  # no NaN, as JSON has it
    assert content["facts"]["module"] == "DeepEnsemble"


def test_a_trial_run_writes_nothing(tmp_path):
    looked(DeepEnsemble(network(), optimizer=adam), tmp_path, fast_dev_run=True)
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------ several processes
def on_two(folder):
    torch.manual_seed(0)
    doctor = PosteriorDoctor(every_n_epochs=2)
    module = DeepEnsemble(network(batch_norm=True), members=4, optimizer=adam)
    run = trainer(
        doctor, max_epochs=4, default_root_dir=folder, devices=2, strategy="ddp",
        num_sanity_val_steps=0,
    )  # fmt: skip
    run.fit(module, Blobs())
    return doctor.report.facts["modes"] if run.is_global_zero else None


@pytest.mark.e2e
def test_the_first_of_two_processes_looks(tmp_path):
    modes = on_devices(2, on_two, tmp_path)
    assert modes == [4, None]
    assert len(Report.read(tmp_path / "doctor.json").curves["loss"]) == 4


def test_labels_beside_reconstructions_are_no_targets():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(200, 4, generator=generator), torch.randint(4, (200,), generator=generator)
    assert _likelihood(x, y, [x, y]) is None
    scores = nn.functional.one_hot(y, 4) + torch.randn(200, 4, generator=generator)
    for outputs in (scores, x[:, :3]):  # as wide as an example, and not
        assert isinstance(_likelihood(outputs, y, [x, y]), Categorical)

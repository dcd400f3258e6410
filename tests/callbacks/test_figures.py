"""Pictures reach whatever logger there is."""

import re
from pathlib import Path
from types import SimpleNamespace

import matplotlib.figure
import pytest
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from runs import Attention, Gan, Plain, Stacked, built, fit
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_bnn.callbacks import MassGap, OrbitDrift, PermutationTau, PosteriorFigures, figures

pytestmark = pytest.mark.usefixtures("undrawn")
FORMS = ("raw", "scaled", "sorted")
TAGS = {f"posterior/{n}/{form}" for n in ("trajectories", "pair") for form in FORMS}
TAGS |= {f"posterior/marginals/{k}.weight" for k in (0, 3, 5)}
TAGS |= {"posterior/tau", "posterior/mass", "posterior/largest"}
"""One for every panel."""
FILES = {f"posterior-{tag.split('/')[1]}" for tag in TAGS}


def run(logger, tmp_path, module=None, draw_every=6):
    callbacks = PermutationTau(), MassGap(2), PosteriorFigures(2, draw_every)
    return fit(module or built(Plain), *callbacks, logger=logger, default_root_dir=tmp_path)


@pytest.mark.parametrize("logger", [False, CSVLogger])
def test_files(tmp_path, logger):
    trainer = run(logger(tmp_path) if logger else False, tmp_path)
    folder = Path(trainer.log_dir if logger else tmp_path) / "figures"
    assert {p.name.rpartition("-")[0] for p in folder.glob("*.png")} == FILES


class Fake(Logger):
    """The part of another service's logger that matters."""

    name, version = "fake", 0

    def __init__(self):
        super().__init__()
        self.seen = []

    @property
    def experiment(self):
        return SimpleNamespace(log_figure=self.log_figure) if hasattr(self, "log_figure") else None

    def log_metrics(self, metrics, step):
        pass

    def log_hyperparams(self, *_):
        pass


class WandbLike(Fake):
    def log_image(self, key, images, step):
        self.seen.append((key, images[0], step))


class MLflowLike(Fake):
    run_id = "7"

    def log_figure(self, run_id, figure, artifact_file):
        self.seen.append((artifact_file.rpartition("-")[0], figure, run_id))


class CometLike(Fake):
    def log_figure(self, figure_name, figure, step):
        self.seen.append((figure_name, figure, step))


@pytest.mark.parametrize("cls", [Plain, Stacked])
def test_loggers_that_take_pictures_have_all_of_them(tmp_path, cls):
    tensorboard, *others = TensorBoardLogger(tmp_path), WandbLike(), MLflowLike(), CometLike()
    run([tensorboard, *others], tmp_path, built(cls), 3 if cls is Plain else 6)
    events = EventAccumulator(tensorboard.log_dir, {"images": 0}).Reload()
    assert set(events.Tags()["images"]) == TAGS
    steps = [e.step for e in events.Images("posterior/pair/raw")]  # as `log` counts
    assert steps == ([5, 11] if cls is Plain else [11])  # the end of training had been drawn
    assert {"tau", "mass", "mass_excess", "tau/0.weight"} <= set(events.Tags()["scalars"])
    assert [e.step for e in events.Scalars("tau")] == list(range(12))
    assert "custom_scalars__config__" in events.Tags()["tensors"]
    for logger in others:
        assert {tag for tag, _, _ in logger.seen} == TAGS
        assert all(isinstance(f, matplotlib.figure.Figure) for _, f, _ in logger.seen)
    assert not (tmp_path / "figures").exists()


def test_following_is_bounded(monkeypatch, tmp_path):
    monkeypatch.setattr(figures, "_POINTS", 4)
    monkeypatch.setattr(PosteriorFigures, "_draw", lambda *_: None)
    callback = PosteriorFigures(1, 100)
    fit(built(Plain), callback, default_root_dir=tmp_path)
    assert len(callback._steps) == len(callback._followed) <= 5
    assert callback._steps[-1] == 11


@pytest.mark.parametrize(("every", "steps"), [(2, [7, 12]), (100, [12])])  # longer than the run
def test_the_end_is_drawn(every, steps, tmp_path):
    logger = WandbLike()
    fit(built(Plain), PosteriorFigures(every, 4), logger=logger, default_root_dir=tmp_path)
    assert [s for tag, _, s in logger.seen if tag == "posterior/pair/raw"] == steps


# ------------------------------------------------------------ what pictures say
def pictures(tmp_path, module, *callbacks):
    """The last figure of every tag."""
    logger = WandbLike()
    fit(module, *callbacks, logger=logger, default_root_dir=tmp_path)
    return {tag: figure for tag, figure, _ in logger.seen}


def heading(figure):
    return figure.get_suptitle().replace("\n", " ")


def heights(figure):
    return {line.get_label(): line.get_ydata()[-1] for line in figure.axes[0].lines}


def test_pictures_say_which_network_they_show_and_what_is_left_out(tmp_path, caplog):
    callbacks = PermutationTau(), MassGap(6), PosteriorFigures(6, 2)
    seen = pictures(tmp_path, Gan(), *callbacks)
    assert caplog.text.count("without generator: pass for example module='generator'") == 1
    assert set(seen) >= {"posterior/tau", "posterior/mass", "posterior/pair/raw"}
    for tag, figure in seen.items():
        assert re.search(r"\d", heading(figure)), tag
        assert "discriminator (Sequential), without generator" in heading(figure)


def test_a_network_that_was_chosen_needs_no_advice(tmp_path, caplog):
    chosen = pictures(tmp_path, Gan(), PosteriorFigures(6, 2, module="generator"))
    assert "Callbacks without" not in caplog.text
    assert all("without discriminator" in heading(f) for f in chosen.values())


def test_each_network_has_the_curves_of_its_own_callbacks(tmp_path):
    names = "generator", "discriminator"
    kinds = MassGap, OrbitDrift, PosteriorFigures
    callbacks = {(kind, n): kind(6, module=n) for n in names for kind in kinds}
    seen = pictures(tmp_path, Gan(), *callbacks.values())
    for name in names:
        mass, minimum, _ = callbacks[MassGap, name].history[-1][1]
        found = heights(seen[f"{name}/posterior/mass"])
        assert found == pytest.approx({"as trained": mass, "minimum": minimum})
        names_of_lines = "last steps", "path", "chance"
        drift = dict(zip(names_of_lines, callbacks[OrbitDrift, name].history[-1][1], strict=True))
        assert heights(seen[f"{name}/posterior/drift"]) == pytest.approx(drift)


def test_curves_of_heads_and_of_the_units_inside_of_them_are_apart(tmp_path):
    module = built(Plain)
    module.net = Attention()
    tau = PermutationTau()
    figure = pictures(tmp_path, module, tau, PosteriorFigures(6, 2))["posterior/tau"]
    query = "self.query.weight"
    assert {name for name in tau.layers if "query" in name} == {query, f"{query}/block"}
    assert len(tau.layers) == len(set(tau.layers)) == len(tau.history[-1][1])
    expected = dict(zip(tau.layers, tau.history[-1][1], strict=True))
    found = {name.lstrip("_"): height for name, height in heights(figure).items()}
    assert found["query/block"] == pytest.approx(expected[f"{query}/block"])
    assert found["query"] == pytest.approx(expected[query])


def test_charts_of_tensorboard_have_one_scale_and_all_networks(monkeypatch, tmp_path):
    monkeypatch.setattr(PosteriorFigures, "_draw", lambda *_: None)
    names = "generator", "discriminator"
    callbacks = [kind(6, module=n) for kind in (MassGap, PosteriorFigures) for n in names]
    taus = [PermutationTau(module=n) for n in names]
    logger = TensorBoardLogger(tmp_path)
    trainer = fit(Gan(), *taus, *callbacks, logger=logger, default_root_dir=tmp_path)
    tags = EventAccumulator(trainer.log_dir).Reload().Tags()["scalars"]
    charts = {title: charted[1][0] for title, charted in figures._LAYOUT["symmetry"].items()}
    shown = {title: {t for t in tags if re.match(tag, t)} for title, tag in charts.items()}
    layers = ("", "/0.weight")
    assert shown["tau"] == {f"{n}/tau{layer}" for n in names for layer in layers}
    assert shown["mass"] == {f"{n}/{m}" for n in names for m in ("mass", "mass_minimum")}
    assert shown["excess mass, %"] == {f"{n}/mass_excess" for n in names}
    assert not any("_moved" in t or "transpositions" in t for t in shown["tau"])
    assert all(shown.values())

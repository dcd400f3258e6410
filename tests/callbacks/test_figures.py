"""Pictures reach whatever logger there is."""

import lightning as L
import matplotlib.figure
import pytest
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from runs import Plain, Stacked, built, fit
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_bnn.callbacks import MassGap, PermutationTau, PosteriorFigures

pytestmark = pytest.mark.usefixtures("undrawn")
FORMS = ("raw", "scaled", "sorted")
TAGS = {f"posterior/{n}/{form}" for n in ("trajectories", "pair") for form in FORMS}
TAGS |= {f"posterior/marginals/{k}.weight" for k in (0, 3, 5)}
TAGS |= {"posterior/tau", "posterior/mass"}
"""One for every panel."""
FILES = {f"posterior-{n}" for n in ("trajectories", "pair", "marginals", "tau", "mass")}


def run(logger, tmp_path, module=None):
    callbacks = PermutationTau(), MassGap(2), PosteriorFigures(2, 3)
    return fit(module or built(Plain), *callbacks, logger=logger, default_root_dir=tmp_path)


@pytest.mark.parametrize("cls", [Plain, Stacked])
def test_tensorboard(tmp_path, cls):
    trainer = run(TensorBoardLogger(tmp_path), tmp_path, built(cls))
    events = EventAccumulator(trainer.log_dir, {"images": 0}).Reload()
    assert set(events.Tags()["images"]) == TAGS
    steps = [e.step for e in events.Images("posterior/pair/raw")]
    assert steps == [5, 11]  # the end of training had been drawn; as `log` counts
    assert {"tau", "mass", "mass_excess", "tau/0.weight"} <= set(events.Tags()["scalars"])
    assert [e.step for e in events.Scalars("tau")] == list(range(12))
    assert "custom_scalars__config__" in events.Tags()["tensors"]


@pytest.mark.parametrize("logger", [False, CSVLogger])
def test_files(tmp_path, logger):
    trainer = run(logger(tmp_path) if logger else False, tmp_path)
    folder = (tmp_path if not logger else type(tmp_path)(trainer.log_dir)) / "figures"
    names = {p.name.rpartition("-")[0] for p in folder.glob("*.png")}
    assert names == FILES


class Fake(Logger):
    """The part of another service's logger that matters."""

    def __init__(self, experiment=None):
        super().__init__()
        self.seen, self._experiment = [], experiment

    name, version = "fake", 0

    @property
    def experiment(self):
        return self._experiment

    def log_metrics(self, metrics, step):
        pass

    def log_hyperparams(self, *_):
        pass


class WandbLike(Fake):
    def log_image(self, key, images, step):
        self.seen.append((key, images[0], step))


class MLflowLike(Fake):
    run_id = "7"

    def __init__(self):
        outer = self

        class Client:
            def log_figure(self, run_id, figure, artifact_file):
                outer.seen.append((artifact_file.rpartition("-")[0], figure, run_id))

        super().__init__(Client())


class CometLike(Fake):
    def __init__(self):
        outer = self

        class Experiment:
            def log_figure(self, figure_name, figure, step):
                outer.seen.append((figure_name, figure, step))

        super().__init__(Experiment())


def test_other_services(tmp_path):
    loggers = [WandbLike(), MLflowLike(), CometLike()]
    run(loggers, tmp_path)
    for logger in loggers:
        assert {tag for tag, _, _ in logger.seen} == TAGS
        assert all(isinstance(f, matplotlib.figure.Figure) for _, f, _ in logger.seen)
    assert not (tmp_path / "figures").exists()


def test_following_is_bounded(monkeypatch, tmp_path):
    from lightning_bnn.callbacks import figures

    monkeypatch.setattr(figures, "_POINTS", 4)
    callback = PosteriorFigures(1, 100)
    fit(built(Plain), callback, default_root_dir=tmp_path)
    assert len(callback._steps) == len(callback._followed) <= 5
    assert callback._steps[-1] == 11
    assert isinstance(callback, L.Callback)


def test_the_end_is_drawn(tmp_path):
    logger = WandbLike()
    fit(built(Plain), PosteriorFigures(2, 4), logger=logger, default_root_dir=tmp_path)
    assert [s for tag, _, s in logger.seen if tag == "posterior/pair/raw"] == [7, 12]

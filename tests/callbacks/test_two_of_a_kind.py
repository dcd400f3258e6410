"""Two callbacks of one kind, of which each watches a network of its own."""

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from runs import Gan, fit
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_bnn import callbacks as C

KINDS = {
    C.PosteriorDoctor: {},
    C.PermutationTau: {},
    C.MassGap: {"every_n_steps": 3},
    C.CheckpointHarvester: {},
    C.PosteriorFigures: {"every_n_steps": 3, "draw_every": 2},
}
pytestmark = pytest.mark.usefixtures("undrawn")


def traces(folder, kind, *networks):
    """Count the files of a run, the tags of its events, and the states in its checkpoint."""
    watching = [kind(module=name, **KINDS[kind]) for name in networks]
    logger = TensorBoardLogger(folder, "", "")
    run = fit(Gan(), *watching, logger=logger, default_root_dir=folder, max_epochs=1)
    run.save_checkpoint(folder / "run.ckpt")
    states = torch.load(folder / "run.ckpt", weights_only=False)["callbacks"]
    (events,) = folder.glob("events*")
    seen = EventAccumulator(str(events)).Reload().Tags()
    tags = [tag for kind in ("scalars", "images", "tensors") for tag in seen[kind]]
    files = [path for path in folder.rglob("*") if path.is_file() and path != events]
    return [len(files), len([t for t in tags if "custom_scalars" not in t]), len(states)]


@pytest.fixture(scope="module")
def none(tmp_path_factory):
    return traces(tmp_path_factory.mktemp("none"), C.PermutationTau)


@pytest.mark.parametrize("kind", KINDS)
def test_both_leave_traces_and_none_in_common(kind, none, tmp_path):
    """Twice as many as one of them, as both networks have as many layers."""
    runs = ("generator",), ("generator", "discriminator")
    seen = [traces(tmp_path / "-".join(names), kind, *names) for names in runs]
    one, both = ([n - m for n, m in zip(run, none, strict=True)] for run in seen)
    assert both == [2 * n for n in one]
    assert both[2] == 2

"""Two callbacks of one kind, of which each watches a network of its own."""

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from runs import QUIET
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import callbacks as C

KINDS = {
    C.PosteriorDoctor: {},
    C.PermutationTau: {},
    C.MassGap: {"every_n_steps": 1},
    C.CheckpointHarvester: {},
    C.PosteriorFigures: {"every_n_steps": 1, "draw_every": 2},
}


pytestmark = pytest.mark.usefixtures("undrawn")


class Pair(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.second = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 2))

    def training_step(self, batch, _):
        loss = nn.functional.cross_entropy(self.second(self.first(batch[0])), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def traces(folder, kind, *networks):
    """Count the files of a run, the tags of its events, and the states in its checkpoint."""
    options = QUIET | {"logger": TensorBoardLogger(folder, "", ""), "log_every_n_steps": 1}
    run = L.Trainer(
        **options, max_epochs=2,
        callbacks=[kind(module=name, **KINDS[kind]) for name in networks],
        default_root_dir=folder,
    )  # fmt: skip
    run.fit(Pair(), DataLoader(TensorDataset(torch.randn(60, 4), torch.arange(60) % 2), 60))
    run.save_checkpoint(folder / "run.ckpt")
    states = torch.load(folder / "run.ckpt", weights_only=False)["callbacks"]
    (events,) = folder.glob("events*")
    seen = EventAccumulator(str(events)).Reload().Tags()
    tags = [tag for kind in ("scalars", "images", "tensors") for tag in seen[kind]]
    files = [path for path in folder.rglob("*") if path.is_file() and path not in (events,)]
    return [len(files), len([t for t in tags if "custom_scalars" not in t]), len(states)]


@pytest.fixture(scope="module")
def none(tmp_path_factory):
    return traces(tmp_path_factory.mktemp("none"), C.PermutationTau)


@pytest.mark.parametrize("kind", KINDS)
def test_both_leave_traces_and_none_in_common(kind, none, tmp_path):
    runs = ("first",), ("second",), ("first", "second")
    seen = [traces(tmp_path / "-".join(names), kind, *names) for names in runs]
    own = [[n - m for n, m in zip(run, none, strict=True)] for run in seen]
    assert own[2] == [n + m for n, m in zip(*own[:2], strict=True)]
    assert own[2][2] == 2

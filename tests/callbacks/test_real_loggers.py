"""Numbers and figures of callbacks reach the real loggers of other services, without a network."""

import importlib.util
import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
from lightning.pytorch.loggers import CometLogger, CSVLogger, MLFlowLogger, WandbLogger
from processes import result
from runs import Plain, built, fit

from lightning_bnn.callbacks import MassGap, PermutationTau, PosteriorFigures

pytestmark = pytest.mark.e2e


def trained(logger, folder):
    """What a run gives to a logger and, to compare with, to CSV."""
    csv = CSVLogger(folder, "csv")
    callbacks = PermutationTau(), MassGap(2), PosteriorFigures(2, 3)
    fit(built(Plain), *callbacks, logger=[logger, csv], default_root_dir=folder)
    assert not list(Path(csv.log_dir).rglob("*.png"))  # the other one has taken them
    table = np.genfromtxt(Path(csv.log_dir) / "metrics.csv", delimiter=",", names=True)
    header = (Path(csv.log_dir) / "metrics.csv").read_text().splitlines()[0].split(",")
    columns = dict(zip(header, table.dtype.names, strict=True))
    return {
        (name, int(row["step"])): float(row[column])
        for name, column in columns.items()
        for row in table
        if name not in ("step", "epoch") and np.isfinite(row[column])
    }


def wandb_run(folder):
    """An offline run: figures are files, and numbers are in one file of records."""
    import wandb

    expected = trained(WandbLogger(save_dir=folder, offline=True, project="x"), folder)
    wandb.finish()
    wandb.teardown()  # waits for the process that writes
    (file,) = Path(folder).rglob("*.wandb")
    content = file.read_bytes()
    figures = [p for p in (file.parent / "files").rglob("*.png") if _is_picture(p.read_bytes())]
    return expected, {name for name, _ in expected if name.encode() in content}, len(figures)


def mlflow_run(folder):
    """A database: in the store of files `tau` and `tau/0.weight` are in each other's way."""
    uri, artifacts = f"sqlite:///{folder}/runs.db", f"{folder}/artifacts"
    logger = MLFlowLogger(tracking_uri=uri, artifact_location=artifacts)
    expected = trained(logger, folder)
    client, run = logger.experiment, logger.run_id
    for name in client.get_run(run).data.metrics:
        for point in client.get_metric_history(run, name):
            assert point.value == pytest.approx(expected.get((name, point.step), point.value))
    figures = [p for p in Path(artifacts).rglob("*.png") if _is_picture(p.read_bytes())]
    return expected, {*client.get_run(run).data.metrics}, len(figures)


def comet_run(folder):
    """An archive with messages; Lightning's `online=False` would record nothing."""
    logger = CometLogger(offline_directory=f"{folder}/comet", project="x")
    expected = trained(logger, folder)
    logger.experiment.end()
    (file,) = Path(folder, "comet").glob("*.zip")
    with zipfile.ZipFile(file) as archive:
        text = archive.read("messages.json").decode()
        figures = [n for n in archive.namelist() if _is_picture(archive.read(n))]
    return expected, {name for name, _ in expected if f'"{name}"' in text}, len(figures)


SERVICES = {
    "wandb": (wandb_run, ("wandb",), {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}),
    "mlflow": (mlflow_run, ("mlflow", "alembic"), {}),
    "comet": (comet_run, ("comet_ml",), {"COMET_START_ONLINE": "false"}),
}


@pytest.mark.parametrize("name", SERVICES)
def test_numbers_and_figures_arrive(name, tmp_path):
    run, packages, environment = SERVICES[name]
    missing = [p for p in packages if importlib.util.find_spec(p) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed: it comes with the extra `loggers`.")
    expected, seen, figures = result(run, str(tmp_path), environment=environment, folder=tmp_path)
    assert len(expected) > 30
    assert {key for key, _ in expected} >= {"tau", "mass", "mass_excess", "tau/0.weight"}
    assert seen >= {key for key, _ in expected}
    assert figures >= 2 * 5  # five panels at the middle and at the end


def _is_picture(content):
    from matplotlib.image import imread

    if content[:4] != b"\x89PNG":
        return b"<svg" in content[:2000]
    return imread(io.BytesIO(content)).std() > 0.01

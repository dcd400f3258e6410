"""Numbers and figures of callbacks reach the real loggers of other services, without a network."""

import importlib.util
import io
import json
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from lightning.pytorch.loggers import CometLogger, CSVLogger, MLFlowLogger, WandbLogger
from processes import result
from runs import Plain, built, fit

from lightning_bnn.callbacks import MassGap, PermutationTau, PosteriorFigures

pytestmark = pytest.mark.e2e
TAGS = {f"posterior/{n}" for n in ("trajectories/raw", "pair/sorted", "tau", "mass")}
TAGS.add("posterior/marginals/0.weight")
STEPS = {5, 11}
BLOCK = 32768


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
    """An offline run: its file holds records behind the frames of a write-ahead log."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    expected = trained(WandbLogger(save_dir=folder, offline=True, project="x"), folder)
    wandb.finish()
    wandb.teardown()  # waits for the process that writes
    (file,) = Path(folder).rglob("*.wandb")
    seen, figures = {}, []
    for content in _records(file.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(content)
        items = record.history.item
        row = {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items}
        step = row.get("trainer/global_step")
        for key, value in row.items():
            if key.endswith(".filenames"):
                path = file.parent / "files" / value[0]
                figures.append((key.removesuffix(".filenames"), step, path.read_bytes()))
            elif isinstance(value, (int, float)):
                seen[key, step] = value
    return expected, seen, figures


def _records(content):
    """Parts of 7 bytes of head (a sum, a length, a type) and a body; none crosses a block."""
    place, parts = 7, []
    while place + 7 <= len(content):
        left = BLOCK - place % BLOCK
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", content, place + 4)
        parts.append(content[place + 7 : place + 7 + length])
        place += 7 + length
        if kind in (1, 4):  # the whole of a record, or its last part
            yield b"".join(parts)
            parts = []


def mlflow_run(folder):
    """A database: in the store of files `tau` and `tau/0.weight` are in each other's way."""
    uri, artifacts = f"sqlite:///{folder}/runs.db", f"{folder}/artifacts"
    logger = MLFlowLogger(tracking_uri=uri, artifact_location=artifacts)
    expected = trained(logger, folder)
    client, run = logger.experiment, logger.run_id
    seen = {
        (name, point.step): point.value
        for name in client.get_run(run).data.metrics
        for point in client.get_metric_history(run, name)
    }
    (root,) = Path(folder, "artifacts").glob("*/artifacts")
    files = [(p, *p.stem.rpartition("-")) for p in root.rglob("*.png")]
    figures = [
        ((p.parent.relative_to(root) / tag).as_posix(), int(step), p.read_bytes())
        for p, tag, _, step in files
    ]
    return expected, seen, figures


def comet_run(folder):
    """An archive with messages; Lightning's `online=False` would record nothing."""
    logger = CometLogger(offline_directory=f"{folder}/comet", project="x")
    expected = trained(logger, folder)
    logger.experiment.end()
    (file,) = Path(folder, "comet").glob("*.zip")
    with zipfile.ZipFile(file) as archive:
        lines = archive.read("messages.json").decode().splitlines()
        messages = [json.loads(line) for line in lines if line.strip()]
        seen, figures = {}, []
        for message in messages:
            payload = message["payload"]
            if message["type"] == "metric_msg":
                metric = payload["metric"]
                seen[metric["metricName"], metric["step"]] = metric["metricValue"]
            elif payload.get("upload_type") == "visualization":
                told = payload["additional_params"]
                content = archive.read(payload["file_path"])
                figures.append((told["figName"], told["step"], content))
    return expected, seen, figures


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
    assert {key: seen.get(key) for key in expected} == pytest.approx(expected, rel=1e-5)
    assert {(tag, step) for tag, step, _ in figures} >= {(t, s) for t in TAGS for s in STEPS}
    assert all(_is_picture(content) for _, _, content in figures)


def _is_picture(content):
    from matplotlib.image import imread

    if content[:4] != b"\x89PNG":
        return b"<svg" in content[:2000]
    return imread(io.BytesIO(content)).std() > 0.01

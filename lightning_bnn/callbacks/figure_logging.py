"""Gives figures to the loggers that take them (TensorBoard, W&B, MLflow, Comet), else to files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["log_figure", "log_folder", "log_layout"]


def log_folder(trainer: Any) -> Path:
    """Where files of a run go; all processes must call this, since they agree on the folder."""
    return Path(trainer.log_dir or trainer.default_root_dir)


def log_figure(trainer: Any, folder: Path, tag: str, figure: Any, step: int) -> None:
    """Give a figure to every logger; those that take none, and runs without, get a file."""
    handled = [_give(logger, tag, figure, step) for logger in trainer.loggers]
    if not any(handled):
        folder = folder / "figures"
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / f"{tag.replace('/', '-')}-{step}.png", dpi=120)


def log_layout(trainer: Any, layout: dict[str, Any]) -> None:
    """Tell TensorBoard which scalars belong together in one chart."""
    for logger in trainer.loggers:
        experiment: Any = getattr(logger, "experiment", None)
        if hasattr(experiment, "add_custom_scalars"):
            experiment.add_custom_scalars(layout)


def _give(logger: Any, tag: str, figure: Any, step: int) -> bool:
    experiment: Any = getattr(logger, "experiment", None)
    if hasattr(experiment, "add_figure"):  # TensorBoard
        experiment.add_figure(tag, figure, global_step=step, close=False)
    elif hasattr(logger, "log_image"):  # Weights & Biases
        logger.log_image(tag, [figure], step=step)
    elif hasattr(experiment, "log_figure") and hasattr(logger, "run_id"):  # MLflow
        experiment.log_figure(logger.run_id, figure, f"{tag}-{step}.png")
    elif hasattr(experiment, "log_figure"):  # Comet
        experiment.log_figure(figure_name=tag, figure=figure, step=step)
    else:
        return False
    return True

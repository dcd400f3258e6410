"""Figures in the loggers that accept them (TensorBoard, W&B, MLflow, Comet), else in files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from weightsym.files import draft_of

T = TypeVar("T")
Taker = Callable[[str, Any, int], None]
"""Takes a tag, a figure and a step."""


def log_folder(trainer: Any) -> Path:
    """Return the folder for files of a run. All processes must call this together."""
    return Path(trainer.log_dir or trainer.default_root_dir)


def log_panels(
    trainer: Any,
    folder: Path,
    tag: str,
    panels: Mapping[str, T],
    draw: Callable[[dict[str, T]], Any],
    step: int,
) -> None:
    """Send panels to every logger one by one, or write all of them to a file.

    Args:
        trainer: of the run.
        folder: for its files.
        tag: of the figure, to which loggers append the name of the panel.
        panels: by name.
        draw: makes a figure of some panels.
        step: of training.
    """
    takers = [taker for taker in map(_taker, trainer.loggers) if taker is not None]
    if not takers:
        _write(folder, tag, draw(dict(panels)), step)
        return
    for name, panel in panels.items():
        figure = draw({name: panel})
        for taker in takers:
            taker(f"{tag}/{name}" if name else tag, figure, step)


def log_layout(trainer: Any, layout: dict[str, Any]) -> None:
    """Tell TensorBoard which scalars share a chart."""
    for logger in trainer.loggers:
        experiment: Any = getattr(logger, "experiment", None)
        if hasattr(experiment, "add_custom_scalars"):
            experiment.add_custom_scalars(layout)


def _taker(logger: Any) -> Taker | None:
    """Return the function of a logger that accepts figures, or None."""
    experiment: Any = getattr(logger, "experiment", None)
    if hasattr(experiment, "add_figure"):  # TensorBoard
        return lambda tag, figure, step: experiment.add_figure(tag, figure, step, close=False)
    if hasattr(logger, "log_image"):  # Weights & Biases
        return lambda tag, figure, step: logger.log_image(tag, [figure], step=step)
    if not hasattr(experiment, "log_figure"):
        return None
    if hasattr(logger, "run_id"):  # MLflow
        return lambda tag, figure, step: experiment.log_figure(
            logger.run_id, figure, f"{tag}-{step}.png"
        )
    return lambda tag, figure, step: experiment.log_figure(  # Comet
        figure_name=tag, figure=figure, step=step
    )


def _write(folder: Path, tag: str, figure: Any, step: int) -> None:
    folder = folder / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    with draft_of(folder / f"{tag.replace('/', '-')}-{step}.png", wait=False) as draft:
        figure.savefig(draft, format="png", dpi=150)

"""The steps of a reproduction: which study is called, how, and how often."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

__all__ = ["PAPERS", "STEPS", "Size", "Step", "chosen_steps"]

Size = Literal["full", "smallest"]
PAPERS = {
    "p1": "A symmetry-aware exploration of Bayesian neural network posteriors",
    "p2": "Variational inference failures under model symmetries",
    "p3": "A compact representation for Bayesian neural networks",
}


@dataclass(frozen=True)
class Step:
    """A study, called in a folder of its own.

    Attributes:
        name: of the step, and of its folder.
        paper: which paper it belongs to.
        study: module of its function below ``studies``, and the function where the names differ.
        minutes: about how long one repetition takes on two cores; None if it trains for hours.
        options: arguments; ``{root}`` in a text stands for the folder of everything.
        smallest: arguments with which it ends in seconds; None if it has no such size.
        seeded: whether it is repeated with other seeds; others have several runs inside.
        after: the step whose networks it reads.
        results: where below its folder the results are.
    """

    name: str
    paper: str
    study: str
    minutes: int | float | None
    options: Mapping[str, Any] = field(default_factory=dict)
    smallest: Mapping[str, Any] | None = field(default_factory=dict)
    seeded: bool = True
    after: str = ""
    results: str = ""

    @property
    def source(self) -> Path:
        """The file of its study."""
        return Path(__file__).parents[1] / f"{self.study.partition(':')[0]}.py"

    def seeds(self, count: int) -> Sequence[int]:
        """The seeds it is called with."""
        return range(count) if self.seeded else (0,)

    def folder(self, root: Path, seed: int) -> Path:
        """Where a repetition writes to."""
        return root / self.name / f"seed_{seed}" if self.seeded else root / self.name

    def arguments(self, root: Path, seed: int, size: Size) -> dict[str, Any]:
        """Everything that its function is called with.

        Args:
            root: folder of everything.
            seed: which repetition.
            size: full or smallest.
        """
        options = self.options if size == "full" else self.smallest
        assert options is not None
        arguments = {name: _placed(value, root) for name, value in options.items()}
        if self.seeded:
            arguments["seed"] = seed
        return {**arguments, "out": str(self.folder(root, seed))}

    def function(self) -> Any:
        """The study itself; it is imported now."""
        module, _, name = self.study.partition(":")
        return getattr(importlib.import_module(f"lightning_bnn.studies.{module}"), name or module)


def chosen_steps(only: Sequence[str]) -> list[Step]:
    """The steps of papers, or those with names; all if nothing is named.

    Args:
        only: names of papers and steps.
    """
    known = [*PAPERS, *(step.name for step in STEPS)]
    for name in only:
        if name not in known:
            raise ValueError(f"`only` must be of {', '.join(known)}, got {name!r}.")
    return [step for step in STEPS if not only or {step.name, step.paper} & set(only)]


def _placed(value: Any, root: Path) -> Any:
    if isinstance(value, str):
        return value.replace("{root}", str(root))
    if isinstance(value, Mapping):
        return {name: _placed(part, root) for name, part in value.items()}
    return value


_FEW = {"members": 6, "epochs": 1}
_TRAINED = "mnist/runs"
_RUNS = f"{{root}}/{_TRAINED}"
_BANK = "mnist_optunets"
_COMPARED: Mapping[str, Any] = {
    "reference": f"{_BANK}[10:]",
    "reference_is": "trained",
    "posteriors": {
        "Ensemble": f"{_BANK}[:10]",
        "Dropout": f"{_RUNS}/dropout",
        "MFVI": f"{_RUNS}/mfvi",
        "SWAG": f"{_RUNS}/swag",
        "SGHMC": f"{_RUNS}/sghmc",
        "Laplace": f"{_RUNS}/laplace",
    },
    "protocol": "p1",
}


def _on_mnist(
    name: str,
    study: str,
    minutes: int | float | None,
    paper: str = "p1",
    after: str = "",
    **options: Any,
) -> Step:
    """A step that needs the files of MNIST, and is called once."""
    return Step(name, paper, study, minutes, options, None, seeded=False, after=after)


STEPS = (
    Step("toy", "p1", "toy", 0.3, smallest={"members": 200}),
    Step("mass", "p1", "mass", 0.3, smallest=_FEW),
    Step("collapse", "p1", "collapse", 0.4, smallest=_FEW),
    Step("permutations", "p1", "permutations", 0.2, smallest={"members": 2, "epochs": 1}),
    Step("marginals", "p1", "marginals", 0.3, smallest=_FEW),
    Step(
        "interpolation",
        "p2",
        "interpolation",
        0.6,
        smallest={"dims": [2], "sigmas": [1.0], "steps": 2},
    ),
    Step(
        "tractable",
        "p2",
        "tractable",
        0.3,
        smallest={"alphas": [0.1], "seeds": 2, "epochs": 1},
        seeded=False,
    ),
    Step(
        "transpositions",
        "p3",
        "transpositions",
        0.3,
        smallest={"hidden": 4, "points": 2, "epochs": 1},
    ),
    Step("compact", "p3", "compact", 1, smallest={"scale": "smallest", "draws": 4}),
    Step(
        "demo",
        "p1",
        "demo",
        1.5,
        smallest={"size": "smallest"},
        seeded=False,
        results="compare",
    ),
    Step("correlation", "p1", "correlation", 3.5, smallest=None),
    Step(
        "width",
        "p2",
        "width",
        3,
        seeded=False,
        smallest={"widths": [2], "draws": [2], "members": 2, "epochs": 1},
    ),
    Step(
        "width_small_start",
        "p2",
        "width",
        1,
        {"widths": [30], "draws": [2], "init_std": 0.05},
        None,
        seeded=False,
    ),
    _on_mnist("width_mnist", "width", 15, "p2", scale="paper", members=3, draws=[20]),
    _on_mnist("mnist/permutations", "permutations", 4, scale="paper", members=3, epochs=40),
    _on_mnist(_TRAINED, "optunets", None),
    _on_mnist("mnist/mass", "mass", 0.2, networks=_BANK),
    _on_mnist("mnist/collapse", "collapse", 2, networks=f"{_BANK}[:300]"),
    _on_mnist("mnist/marginals", "marginals", 0.5, networks=_BANK),
    _on_mnist("mnist/compare", "compare", 10, after=_TRAINED, **_COMPARED),
)
"""All steps: first what takes little time, last what needs the files of MNIST."""

"""The references that come with the package."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from lightning_bnn.evaluation.problem import Problem, read_problem
from lightning_bnn.evaluation.stored_posteriors import Location, StoredPosterior, read_posterior
from lightning_bnn.references.cards import Card

__all__ = ["is_gold", "read_reference", "reference_folder", "reference_names", "reference_location"]


def reference_names() -> list[str]:
    """The names of all references, sorted.

    >>> reference_names()
    ['airfoil', 'concrete', 'digits', 'digits_wide', 'energy', 'sine', 'two_gaussians', 'yacht']
    """
    return sorted(path.parent.name for path in _root().glob("*/card.json"))


def reference_folder(name: str) -> Path:
    """Where a reference is: its configuration, its card, and a bank of its draws.

    >>> folder = reference_folder("sine")
    >>> sorted(path.name for path in folder.iterdir())
    ['bank', 'card.json', 'config.yaml']
    """
    if name not in reference_names():
        known = ", ".join(reference_names())
        raise ValueError(f"There is no reference {name!r}; choose from: {known}.")
    return _root() / name


def is_gold(name: str) -> bool:
    """Whether a reference may rank what is compared with it: its card says so.

    >>> is_gold("two_gaussians")
    True
    """
    return Card.read(reference_folder(name) / "card.json").verdict == "gold"


def reference_location(text: str) -> Location:
    """A reference by its name, or networks on disk that stand for one.

    >>> reference_location("sine").path.name
    'bank'
    """
    if text in reference_names():
        return Location(reference_folder(text) / "bank")
    location = Location.of(text)
    if not location.path.exists():
        known = ", ".join(reference_names())
        raise ValueError(
            f"There is no reference {text!r}, and nothing at {location.path}; choose a bank, or "
            f"from: {known}."
        )
    return location


def read_reference(name: str) -> tuple[StoredPosterior, Problem, Card]:
    """The draws of a reference, its network and data, and its card.

    >>> posterior, problem, card = read_reference("two_gaussians")
    >>> len(posterior.modes), card.verdict
    (8, 'gold')
    """
    folder = reference_folder(name)
    problem = read_problem(folder / "config.yaml")
    stored = read_posterior(name, Location(folder / "bank"), problem)
    return stored, problem, Card.read(folder / "card.json")


def _root() -> Path:
    return Path(str(files("lightning_bnn") / "references"))

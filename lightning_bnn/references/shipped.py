"""The references of the data distribution, and readable cards."""

from __future__ import annotations

from pathlib import Path

from lightning_bnn.bank.shipped import data_folder, missing_data
from lightning_bnn.evaluation.problem import Problem, read_problem
from lightning_bnn.evaluation.stored_posteriors import Location, StoredPosterior, read_posterior
from lightning_bnn.references.cards import Card
from weightsym.files import read_settings


def reference_names() -> list[str]:
    """Return the sorted names of all installed references.

    >>> reference_names()
    ['airfoil', 'concrete', 'digits', 'digits_wide', 'energy', 'sine', 'two_gaussians', 'yacht']
    """
    root = _root()
    return [] if root is None else sorted(card.parent.name for card in root.glob("*/card.json"))


def reference_folder(name: str) -> Path:
    """Return the folder of a reference: its configuration, its card, and a bank of its draws.

    >>> folder = reference_folder("sine")
    >>> sorted(path.name for path in folder.iterdir())
    ['bank', 'card.json', 'config.yaml']
    """
    root = _root()
    if root is None:
        raise missing_data(f"The reference {name!r}")
    if name not in reference_names():
        names = ", ".join(reference_names())
        raise ValueError(f"There is no reference {name!r}; choose from: {names}.")
    return root / name


def is_gold(name: str) -> bool:
    """Return whether a reference is gold by its card, and so may rank approximations.

    >>> is_gold("two_gaussians")
    True
    """
    return Card.read(reference_folder(name) / "card.json").verdict == "gold"


def reference_location(text: str) -> Location:
    """Find a reference by name, or networks on disk that can be used as one.

    >>> reference_location("sine").path.name
    'bank'
    """
    if text in reference_names():
        return Location(reference_folder(text) / "bank")
    location = Location.of(text)
    if not location.path.exists():
        if _root() is None:
            raise missing_data(f"There is nothing at {location.path}, and a reference {text!r}")
        names = ", ".join(reference_names())
        raise ValueError(
            f"There is no reference {text!r}, and nothing at {location.path}; choose a bank, or "
            f"from: {names}."
        )
    return location


def read_reference(name: str) -> tuple[StoredPosterior, Problem, Card]:
    """Return the draws of a reference, its network and data, and its card.

    >>> posterior, problem, card = read_reference("two_gaussians")
    >>> len(posterior.modes), card.verdict
    (8, 'gold')
    """
    folder = reference_folder(name)
    problem = read_problem(folder / "config.yaml")
    stored = read_posterior(name, Location(folder / "bank"), problem)
    return stored, problem, Card.read(folder / "card.json")


def _root() -> Path | None:
    folder = data_folder()
    return None if folder is None else folder / "references"


_USE = (
    "to score approximations of this posterior, or samplers, under this network, prior and "
    "likelihood (`lightning-bnn fidelity`)"
)
_LIMITS = (
    "does not apply to other priors, likelihoods or networks; a small network on little "
    "data, not a model to predict with; draws of one chain are dependent"
)


def readable_card(name: str, card: Card) -> str:
    """Return all entries of a reference's card, with its network, prior and data, one per line.

    Args:
        name: of the reference.
        card: its card.

    >>> from lightning_bnn.references import read_reference
    >>> card = read_reference("two_gaussians")[2]
    >>> lines = readable_card("two_gaussians", card).splitlines()
    >>> [line.partition(":")[0] for line in lines][:5]
    ['what', 'verdict', 'level', 'data', 'network']
    """
    folder = reference_folder(name)
    settings = read_settings(folder / "config.yaml")
    model = settings["model"]["init_args"]
    likelihood = model.get("likelihood", {"class_path": "Categorical"})
    function = card.diagnosis.spaces["function"]
    run = card.made
    rows = {
        "what": card.about,
        "verdict": "; ".join((card.verdict, *card.failures)),
        "level": card.level,
        "data": _called(settings["data"]),
        "network": _called(model["network"]),
        "prior": f"normal, standard deviation {model['prior_std']}, on every weight and bias",
        "likelihood": _called(likelihood),
        "sampler": f"{run['sampler']} ({_listed(run['settings'])}), {run['transitions']} "
        f"transitions, the first {run['burn_in']} left out, one in {run['every']} kept",
        "draws": f"{card.diagnosis.chains} chains of {card.diagnosis.draws}",
        "diagnostics": f"R-hat of predictions {function['rhat_median']:.3f} in the median, "
        f"{function['rhat_max']:.3f} at most; at least {function['ess_min']:.0f} effective draws",
        "other seeds": f"{len(card.again)} more runs, "
        f"{sum(not seed['failures'] for seed in card.again)} without a failure",
        "cost": f"{run['gradients']} gradients, {run['seconds']} s of {run['machine']}",
        "versions": run["versions"],
        "licence": card.licence,
        "intended use": _USE,
        "limits": _LIMITS,
        "sha256": f"{card.sha256} (of all numbers of the draws)",
        "folder": f"{folder} (config.yaml is what `lightning-bnn fit` runs)",
    }
    return "\n".join(f"{key + ':':<14}{value}" for key, value in rows.items())


def _called(settings: dict[str, object]) -> str:
    arguments = settings.get("init_args")
    name = str(settings["class_path"]).removeprefix("lightning_bnn.")
    return f"{name}({_listed(arguments) if isinstance(arguments, dict) else ''})"


def _listed(settings: dict[str, object]) -> str:
    return ", ".join(f"{key}={value}" for key, value in settings.items())

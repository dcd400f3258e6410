"""A card for people: what a sampled posterior is, how it was made, what it is good for."""

from __future__ import annotations

from lightning_bnn.references.cards import Card
from lightning_bnn.references.shipped import reference_folder
from lightning_bnn.settings_files import read_settings

__all__ = ["readable_card"]

_USE = (
    "to score approximations of this posterior, or samplers, under this network, prior and "
    "likelihood (`lightning-bnn fidelity`)"
)
_LIMITS = (
    "says nothing about other priors, likelihoods or networks; a small network on little data, no "
    "model to predict with; draws of one chain depend on each other"
)


def readable_card(name: str, card: Card) -> str:
    """Everything on the card of a reference, with its network, prior and data, in a line each.

    Args:
        name: of the reference.
        card: what is known of it.

    >>> from lightning_bnn.references import read_reference
    >>> card = read_reference("two_gaussians")[2]
    >>> lines = readable_card("two_gaussians", card).splitlines()
    >>> [line.partition(":")[0] for line in lines][:5]
    ['what', 'verdict', 'data', 'network', 'prior']
    """
    settings = read_settings(reference_folder(name) / "config.yaml")
    model = settings["model"]["init_args"]
    likelihood = model.get("likelihood", {"class_path": "Categorical"})
    function = card.diagnosis.spaces["function"]
    made = card.made
    rows = {
        "what": card.about,
        "verdict": "; ".join((card.verdict, *card.failures)),
        "data": _called(settings["data"]),
        "network": _called(model["network"]),
        "prior": f"normal, standard deviation {model['prior_std']}, on every weight and bias",
        "likelihood": _called(likelihood),
        "sampler": f"{made['sampler']} ({_listed(made['settings'])}), {made['transitions']} "
        f"transitions, the first {made['burn_in']} left out, one in {made['every']} kept",
        "draws": f"{card.diagnosis.chains} chains of {card.diagnosis.draws}",
        "diagnostics": f"R-hat of predictions {function['rhat_median']:.3f} in the median, "
        f"{function['rhat_max']:.3f} at most; at least {function['ess_min']:.0f} effective draws",
        "other seeds": f"{len(card.again)} more runs, "
        f"{sum(not other['failures'] for other in card.again)} without a failure",
        "cost": f"{made['gradients']} gradients, {made['seconds']} s of {made['machine']}",
        "versions": made["versions"],
        "licence": card.licence,
        "intended use": _USE,
        "limits": _LIMITS,
        "sha256": f"{card.sha256} (of all numbers of the draws)",
    }
    return "\n".join(f"{key + ':':<14}{value}" for key, value in rows.items())


def _called(part: dict[str, object]) -> str:
    arguments = part.get("init_args")
    name = str(part["class_path"]).removeprefix("lightning_bnn.")
    return f"{name}({_listed(arguments) if isinstance(arguments, dict) else ''})"


def _listed(settings: dict[str, object]) -> str:
    return ", ".join(f"{key}={value}" for key, value in settings.items())

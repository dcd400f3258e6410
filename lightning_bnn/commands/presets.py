"""`lightning-bnn presets`: the configurations that come with the package."""

from __future__ import annotations

from importlib.resources import files

from weightsym import did_you_mean

__all__ = ["HINT", "preset_names", "preset_text", "presets"]

HINT = "`lightning-bnn presets NAME > FILE` writes a preset."


def presets(name: str | None = None) -> None:
    """List the presets, or print one, to be copied or piped.

    Args:
        name: the one to print; by default all are listed.
    """
    if name is not None:
        print(preset_text(name), end="")
        return
    for preset in preset_names():
        print(f"{preset:<28} {_title(preset)}")
    print("\nlightning-bnn presets NAME > my.yaml; lightning-bnn fit -c my.yaml")


def preset_names() -> list[str]:
    """The names of all presets, sorted."""
    folder = files("lightning_bnn") / "configs"
    return sorted(
        f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml")
    )


def preset_text(name: str) -> str:
    """The YAML of a preset."""
    if name not in preset_names():
        meant = did_you_mean(name, preset_names())
        raise ValueError(
            f"there is no preset {name!r}{meant or '; `lightning-bnn presets` lists them.'}"
        )
    return (files("lightning_bnn") / "configs" / f"{name}.yaml").read_text(encoding="utf-8")


def _title(name: str) -> str:
    return preset_text(name).splitlines()[0].removeprefix("# ")

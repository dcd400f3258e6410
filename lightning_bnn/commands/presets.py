"""`lightning-bnn presets`: the configurations of the package."""

from __future__ import annotations

from importlib.resources import files

from weightsym import did_you_mean

HINT = "`lightning-bnn presets NAME > FILE` writes a preset."
_OWN = "lightning_bnn"


def presets(name: str | None = None) -> None:
    """List the presets, or print one.

    Args:
        name: name of the preset to print; by default all are listed.
    """
    show_presets(name, _OWN)


def show_presets(name: str | None, package: str) -> None:
    """List the presets of a package, or print one.

    Args:
        name: name of the preset to print; None lists all.
        package: package with the presets in its folder ``configs``.
    """
    if name is not None:
        print(preset_text(name, package), end="")
        return
    for preset in preset_names(package):
        print(f"{preset:<28} {_title(preset, package)}")
    print(f"\n{program_of(package)} presets NAME > my.yaml; lightning-bnn fit -c my.yaml")


def program_of(package: str) -> str:
    """Return the name of a package's console script.

    >>> program_of("lightning_bnn")
    'lightning-bnn'
    """
    return package.replace("_", "-")


def preset_names(package: str = _OWN) -> list[str]:
    """Return the sorted names of all presets of a package."""
    folder = files(package) / "configs"
    return sorted(
        f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml")
    )


def preset_text(name: str, package: str = _OWN) -> str:
    """Return the YAML of a preset.

    Args:
        name: one of `preset_names`.
        package: its package.
    """
    if name not in preset_names(package):
        meant = did_you_mean(name, preset_names(package))
        lists = f"; `{program_of(package)} presets` lists them."
        raise ValueError(f"there is no preset {name!r}{meant or lists}")
    return (files(package) / "configs" / f"{name}.yaml").read_text(encoding="utf-8")


def _title(name: str, package: str) -> str:
    return preset_text(name, package).splitlines()[0].removeprefix("# ")

"""Configurations in YAML, or one sentence that names the file and line of an error."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

_KEYS = {"class_path": str, "init_args": dict}
"""Keys that no class may misread, and what stands behind them."""
_SHOWN, _DEPTH, _SIZE = 60, 100, 10**6
_NEARLY = 0.85


def read_settings(path: str | Path) -> dict[str, Any]:
    """Read a configuration as nested dicts.

    Args:
        path: a file.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"`config`: {path} is not a YAML file: it is not text in UTF-8."
        ) from error
    except IsADirectoryError as error:
        raise ValueError(f"`config`: {path} is a folder, not a YAML file.") from error
    return settings_of_text(text, str(path))


def settings_of_text(text: str, name: str) -> dict[str, Any]:
    """Parse the text of a configuration.

    Args:
        text: YAML.
        name: of the file, for messages.
    """
    try:
        _check_size(text, name)
        settings = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"`config`: {name} is not a YAML file ({_syntax(error)}).") from error
    if not isinstance(settings, dict):
        quoted = "nothing" if settings is None else repr(settings)
        quoted = quoted if len(quoted) <= _SHOWN else quoted[:_SHOWN] + "..."
        raise ValueError(
            f"`config`: {name} must hold groups of settings, such as `model` and `data`, got "
            f"{quoted}."
        )
    _check_keys(settings, name)
    return settings


def _check_size(text: str, name: str) -> None:
    """Refuse deep nesting, and aliases that expand to a large size."""
    sizes: dict[str | None, int] = {}
    groups: list[tuple[str | None, int]] = []  # those that are open: anchor, and size so far
    for event in yaml.parse(text, yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            groups.append((event.anchor, 1))
            sizes[event.anchor] = _SIZE + 1  # until it ends: what holds itself has no end
        elif isinstance(event, yaml.CollectionEndEvent):
            sizes[groups[-1][0]] = groups[-1][1]
            _add(groups, groups.pop()[1])
        elif isinstance(event, yaml.AliasEvent | yaml.ScalarEvent):
            _add(groups, sizes.get(event.anchor, 1) if isinstance(event, yaml.AliasEvent) else 1)
        if len(groups) > _DEPTH:
            raise ValueError(f"`config`: {name} is nested more than {_DEPTH} levels deep.")
        if groups and groups[-1][1] > _SIZE:
            raise ValueError(f"`config`: {name} holds more than {_SIZE} values, aliases included.")


def _add(groups: list[tuple[str | None, int]], size: int) -> None:
    if groups:
        groups[-1] = groups[-1][0], groups[-1][1] + size


def config_files(typed: Sequence[str]) -> list[str]:
    """List the existing files that a command line names as configurations.

    Args:
        typed: the command line.
    """
    return [name for name in named_configs(typed) if os.path.isfile(name)]


def named_configs(typed: Sequence[str]) -> list[str]:
    """List everything that a command line names as a configuration.

    Args:
        typed: the command line.
    """
    named = [typed[k + 1] for k, word in enumerate(typed[:-1]) if word in ("-c", "--config")]
    return named + [w.partition("=")[2] for w in typed if w.startswith(("-c=", "--config="))]


def _check_keys(settings: dict[str, Any], name: str) -> None:
    """Refuse misspelt keys of a class or its arguments, which would otherwise be plain values."""
    for where, group in _groups(settings, ""):
        for key, value in group.items():
            meant = _misspelt(str(key))
            if meant and meant not in group and isinstance(value, _KEYS[meant]):
                raise ValueError(
                    f"`config`: in {name}, `{where}{key}` is unknown; did you mean `{meant}`?"
                )


def _misspelt(key: str) -> str | None:
    """Return the key that is nearly matched, but not by `ckpt_path` and `data_path`."""
    near = get_close_matches(key.lower(), _KEYS, 1, _NEARLY)
    return near[0] if near and key not in _KEYS else None


def _groups(settings: Any, where: str) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Yield every mapping that may describe a class, with its full name, outer ones first."""
    if isinstance(settings, dict):
        yield where, settings
        for key, value in settings.items():
            if key == "init_args" and isinstance(value, dict):  # a class has its own names
                for name, inner in value.items():
                    yield from _groups(inner, f"{where}{name}.")
            else:
                yield from _groups(value, f"{where}{key}.")
    elif isinstance(settings, list):
        for k, value in enumerate(settings):
            yield from _groups(value, f"{where}{k}.")


def _syntax(error: yaml.YAMLError) -> str:
    """Describe a syntax error and its position, without the text itself."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    return f"line {mark.line + 1}, column {mark.column + 1}: {getattr(error, 'problem', error)}"

"""The symmetries of `weightsym` under the name of this package."""

from typing import TYPE_CHECKING, Any

import weightsym

if TYPE_CHECKING:
    from weightsym import *  # noqa: F403

__all__ = [*vars(weightsym)["__all__"]]


def __getattr__(name: str) -> Any:
    return getattr(weightsym, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

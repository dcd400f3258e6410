"""The base of callbacks that never end a run: errors switch them off with one warning."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn

from weightsym.params import first_line

_HOOKS = {n for n, f in vars(Callback).items() if callable(f) and not n.startswith("_")}
_SAVING = {"state_dict", "load_state_dict"}


class RefusedArgument(ValueError):
    """An argument of a callback that does not fit the run, and ends it at its start."""


class Onlooker(Callback):
    """A callback that watches a run without affecting it.

    An error in a hook is reported in one warning, the callback is switched off until the next fit,
    and training continues. Only a `RefusedArgument` of the user and interrupts end the run.
    """

    _active = True
    """Whether it is on; if not, its hooks do nothing."""
    _inside = False
    """Whether one of its hooks is running, which may call others."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in _HOOKS & vars(cls).keys():
            setattr(cls, name, _harmless(vars(cls)[name]))

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._active = True

    def _switch_off(self, reason: str) -> None:
        self._active = False
        rank_zero_warn(f"{type(self).__name__} is switched off: {reason}")
        with contextlib.suppress(Exception):  # what has failed may fail again
            self._close()

    def _close(self) -> None:
        """Release the run, its network and its files."""


def _harmless(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a hook so that an error switches its callback off."""
    name = hook.__name__

    @functools.wraps(hook)
    def call(self: Onlooker, *args: Any, **kwargs: Any) -> Any:
        if self._inside:
            return hook(self, *args, **kwargs)
        if not self._active and name != "setup" and name not in _SAVING:
            return None
        self._inside = True
        try:
            return hook(self, *args, **kwargs)
        except RefusedArgument:
            raise
        except Exception as error:
            self._switch_off(_reason(name, error))
            return {} if name == "state_dict" else None
        finally:
            self._inside = False

    return call


def _reason(hook: str, error: Exception) -> str:
    """Return our own message, or the error and its hook."""
    line = first_line(error)
    return line if type(error) is ValueError else f"{hook} ended in {type(error).__name__}: {line}"

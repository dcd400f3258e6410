"""What parts of a module have in common: they know the module, and do not keep it alive."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_bnn.modules.bayesian import Bayesian
else:  # parts cannot import the file that imports them
    from lightning.pytorch import LightningModule as Bayesian

__all__ = ["Bayesian", "Part"]


class Part:
    """A part of a module, which goes with it into copies and files.

    Modules that nobody uses any more must free their memory at once, so that the part refers to
    its module weakly.

    Args:
        module: of which this is a part.
    """

    def __init__(self, module: Bayesian) -> None:
        self._module = weakref.ref(module)

    @property
    def module(self) -> Bayesian:
        """The module of this part."""
        module = self._module()
        assert module is not None
        return module

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_module": self.module}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _module=weakref.ref(state["_module"]))

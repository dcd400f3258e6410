import logging
import sys

import pytest
import torch
from annotation_checks import use_cheap_checks
from no_skips import unskipped


@pytest.fixture(autouse=True)
def _reproducible():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    yield
    logger.setLevel(level)  # scripts make it quiet
    cache = sys.modules.get("lightning_bnn.symmetry.discovery.cache")
    if cache is not None:  # every test reads its networks itself
        cache.forget()


@pytest.fixture(scope="module")
def undrawn():
    """Figures are made and saved, and not drawn, which takes longer than all else."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "draw", lambda *_: None)
        patch.setattr(ConstrainedLayoutEngine, "execute", lambda *_: None)
        yield


def pytest_configure(config):
    torch.set_num_threads(1)
    if config.getoption("jaxtyping_packages", None):
        use_cheap_checks()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    return unskipped((yield))

import contextlib
import gc
import logging
import os
import re
import sys
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from annotation_checks import use_cheap_checks


@pytest.fixture(autouse=True)
def _reproducible(request):
    torch.set_num_threads(1)
    _seed(0)
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    with _solved_once("monkeypatch" in request.fixturenames):
        yield
    logger.setLevel(level)  # scripts make it quiet


# `manual_seed` keeps a stack trace for every kind of device that is not there
_seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


@contextlib.contextmanager
def _solved_once(patched):
    """All tests of a process share what is solved, except where one may have replaced parts."""
    before = _solved().copy()
    yield
    if patched:
        _solved().clear()
        _solved().update(before)


def _solved():
    """The results that discovery keeps; many more than it keeps for a user."""
    cache = sys.modules.get("weightsym.discovery.cache")
    if cache is None:
        return {}
    cache._LIMIT = 1000
    return cache._results


_SHARED = "LIGHTNING_BNN_SYMMETRIES"


@pytest.fixture(scope="session", autouse=True)
def _read_by_all(tmp_path_factory):
    """Processes of one run share what they read of the networks that are known.

    Both runs of `make test-all` do, by the folder `LIGHTNING_BNN_SYMMETRIES`.
    """
    table, folder = sys.modules.get("known_networks.table"), os.environ.get(_SHARED)
    if not folder and "PYTEST_XDIST_WORKER" in os.environ:
        folder = tmp_path_factory.getbasetemp().parent / "symmetries"
    if table and folder:
        folder = Path(folder)
        folder.mkdir(exist_ok=True)
        table.SHARED[:] = [folder]


@pytest.fixture(scope="module")
def undrawn():
    """Figures are made and saved, small and not drawn, which takes longer than all else."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    from lightning_bnn.plots.plain_figure import PlainFigure

    save = Figure.savefig
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda self, *a, **o: save(self, *a, **o | {"dpi": 10}))
        patch.setattr(ConstrainedLayoutEngine, "execute", lambda *_: None)
        for kind in (Figure, PlainFigure):
            patch.setattr(kind, "draw", lambda *_: None)
        yield


def pytest_configure(config):
    torch.set_num_threads(1)
    if config.getoption("jaxtyping_packages", None):
        use_cheap_checks()


def pytest_sessionstart():
    """Find the engines of this checkout where its distributions are not installed."""
    from weightsym.networks import engines

    if find_spec("weightsym_fast") and not engines.entry_points(group=engines.GROUP):
        project = Path(__file__).parents[1].joinpath("fast/pyproject.toml").read_text("utf-8")
        lines = re.findall(r'^(\w+) = "(weightsym_fast\..+)"', project, re.MULTILINE)
        points = [EntryPoint(*line, engines.GROUP) for line in lines]
        engines.entry_points = lambda group: points


def pytest_collection_finish():
    """What has been imported stays: collecting garbage need not look at it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """With `LIGHTNING_BNN_NO_SKIPS=1`, for packages of others, a failure in place of a skip."""
    report = yield
    expected_to_fail = hasattr(report, "wasxfail")
    if report.skipped and not expected_to_fail and os.environ.get("LIGHTNING_BNN_NO_SKIPS") == "1":
        report.outcome = "failed"
        report.longrepr = f"Nothing may be skipped here: {report.longrepr}"
    return report

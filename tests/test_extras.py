"""Packages of extras: nothing imports them on its own, and one sentence says what is missing."""

import shlex
import sys
from pathlib import Path

import pytest
import torch

from bnn_research.marginals import clusters
from lightning_bnn import models
from lightning_bnn.datamodules import CIFAR10, MNIST, Diabetes, Digits
from lightning_bnn.extras import EXTRAS, needed
from lightning_bnn.hub import from_hub, push_to_hub
from weightsym import MissingPackage
from weightsym.commands.mistakes import mistake

X = torch.randn(5, 3)


CALLS = [
    ("sklearn", lambda: Digits().load()),
    ("sklearn", lambda: Diabetes().load()),
    ("sklearn", lambda: clusters({"w": X})),
    ("torchvision", lambda: MNIST(root="nowhere").load()),
    ("torchvision", lambda: CIFAR10(root="nowhere").load()),
    ("torchvision", models.resnet18),
    ("huggingface_hub", lambda: from_hub("me/it")),
    ("huggingface_hub", lambda: push_to_hub("sine", "me/it")),
]


@pytest.fixture
def missing(monkeypatch):
    """Makes a package one that is not installed."""

    def remove(name):
        loaded = [n for n in sys.modules if n.startswith(f"{name}.")]
        for module in (name, *loaded):
            monkeypatch.setitem(sys.modules, module, None)

    return remove


@pytest.mark.bad_input
@pytest.mark.parametrize(("name", "call"), CALLS)
def test_a_missing_package_is_told_with_its_extra(name, call, missing):
    missing(name)
    package, install = EXTRAS[name]
    with pytest.raises(MissingPackage) as caught:
        call()
    sentence = str(caught.value)
    assert sentence.endswith(f" needs {package}: pip install {shlex.quote(install)}")
    assert mistake(caught.value, ["toy"], "lightning-bnn") == sentence


def test_what_no_extra_brings_stays_what_it_is(missing):
    missing("nowhere")
    with pytest.raises(ModuleNotFoundError) as caught, needed("This"):
        import nowhere  # noqa: F401
    assert type(caught.value) is ModuleNotFoundError
    assert mistake(caught.value, ["toy"], "lightning-bnn") is None


def test_extras_are_those_of_the_projects():
    tomllib = pytest.importorskip("tomllib")
    root, projects = Path(__file__).parents[1], {}
    for name, folder in (("lightning_bnn", root), ("weightsym", root / "weightsym")):
        projects[name] = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]
    for package, install in EXTRAS.values():
        project, _, extra = install.rstrip("]").partition("[")
        extras = projects.get(project, {}).get("optional-dependencies", {})
        assert not extra or any(line.startswith(package) for line in extras[extra])
        for depends in projects.values():
            assert not any(line.startswith(package) for line in depends["dependencies"])
    extras = projects["lightning_bnn"]["optional-dependencies"]
    everything = ",".join(sorted(extras.keys() - {"all", "dev", "docs", "loggers"}))
    assert extras["all"] == [f"lightning_bnn[{everything}]"]

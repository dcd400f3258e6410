"""What `import lightning_bnn` costs: nothing heavy, and no private folder of the machine."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.e2e
HEAVY = ("cvxpy", "laplace", "matplotlib", "sklearn", "ray", "torchvision")
SUBPACKAGES = (
    "lightning_bnn.params",
    "lightning_bnn.models",
    "lightning_bnn.symmetry",
    "lightning_bnn.cli",
)


def loaded(*modules):
    code = f"import sys, {', '.join(modules)}; print(' '.join(sys.modules))"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()


def test_heavy_dependencies_are_imported_where_they_are_used():
    assert not set(loaded("lightning_bnn", *SUBPACKAGES)) & set(HEAVY)


def test_the_package_itself_does_not_even_import_torch():
    assert "torch" not in loaded("lightning_bnn")


def test_submodules_are_reachable_by_attribute():
    names = "b.symmetry.discover.__name__, 'symmetry' in dir(b), b.__version__"
    code = f"import lightning_bnn as b; print({names})"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert out.startswith("discover True 0.")

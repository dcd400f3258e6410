"""What `import lightning_bnn` costs: nothing heavy, and no private folder of the machine."""

import subprocess
import sys

import pytest

from lightning_bnn import callbacks

pytestmark = pytest.mark.e2e
HEAVY = ("curvlinops", "cvxpy", "laplace", "matplotlib", "sklearn", "ray", "torchvision")
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


STRATEGY = "import sys; print('lightning' in sys.modules); import lightning as L; " + (
    "print(type(L.Trainer(strategy='members', devices=2, accelerator='cpu').strategy).__name__)"
)


@pytest.mark.parametrize(
    ("first", "lazy"),
    [
        ("import lightning.pytorch; import lightning_bnn", False),
        ("import lightning_bnn.modules", False),
        ("import lightning_bnn", True),
    ],
)
def test_members_is_a_strategy_of_every_trainer(first, lazy):
    """After our modules, and beside Lightning; the bare package imports nothing."""
    done = subprocess.run(
        [sys.executable, "-c", f"{first}; {STRATEGY}"], capture_output=True, text=True
    )
    assert done.stdout.split()[0] == str(not lazy)
    if lazy:
        assert "MembersStrategy" not in done.stdout
    else:
        assert done.stdout.split()[1] == "MembersStrategy", done.stderr


def test_submodules_are_reachable_by_attribute():
    names = "b.symmetry.discover.__name__, 'symmetry' in dir(b), b.__version__"
    code = f"import lightning_bnn as b; print({names})"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert out.startswith("discover True 0.")


CORE = tuple(f"lightning_bnn.{name}" for name in ("symmetry", "params", "stacks", "fast"))


@pytest.mark.parametrize(
    ("names", "most"), [(["PermutationTau"], 12), (callbacks.__all__, 22)], ids=["one", "all"]
)
def test_callbacks_import_the_symmetries_and_few_other_files(names, most):
    """Figures, banks and the doctor are imported once a run needs them."""
    code = f"import sys; from lightning_bnn.callbacks import {', '.join(names)}"
    code += "\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    files = [name for name in done.stdout.split() if name.startswith("lightning_bnn")]
    assert "lightning_bnn.callbacks.permutation_tau" in files
    assert len([name for name in files if not name.startswith(CORE)]) <= most


def test_no_submodule_hides_a_function_of_its_name():
    code = """
import lightning_bnn.symmetry.verify, lightning_bnn.symmetry as S
from lightning_bnn.symmetry import fingerprint
print(S.verify.__name__, S.verify.__module__, callable(fingerprint), hasattr(S, "verified"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["verify", "lightning_bnn.symmetry.verify", "True", "False"]


def test_saved_symmetries_can_be_read_by_torch_once_the_package_is_imported(tmp_path):
    """Classes must be known to be safe, although the package imports what it exports later."""
    file = str(tmp_path / "sym.pt")
    save = (
        "import torch; from lightning_bnn.symmetry import discover; "
        f"torch.save(discover(torch.nn.Linear(2, 3), torch.randn(4, 2)), {file!r})"
    )
    subprocess.run([sys.executable, "-c", save], check=True)
    read = f"import torch; {{}}print(type(torch.load({file!r}, weights_only=True)).__name__)"
    with_package = read.format("import lightning_bnn.symmetry; ")
    done = subprocess.run([sys.executable, "-c", with_package], capture_output=True, text=True)
    assert done.stdout.split() == ["Symmetries"], done.stderr
    without = subprocess.run([sys.executable, "-c", read.format("")], capture_output=True)
    assert without.returncode

"""What `import lightning_bnn` costs: nothing heavy, and no private folder of the machine."""

import subprocess
import sys

import pytest
from processes import fresh

from lightning_bnn import callbacks
from lightning_bnn.extras import EXTRAS as OURS

pytestmark = pytest.mark.e2e
HEAVY = {"cvxpy", "laplace", "matplotlib", "sklearn", "ray", "torchvision"}
IMPORTED = "import {}, sys; print(*sys.modules)"
FROM_CALLBACKS = "import sys; from lightning_bnn.callbacks import {}; print(*sys.modules)"
SUBMODULES = """
import lightning_bnn.metrics.mmd, lightning_bnn.metrics as M
print(M.mmd.__name__, M.mmd.__module__, callable(M.mmd), hasattr(M, "mmds"))
"""
EXTRAS = [*OURS, "weightsym_fast"]
WITHOUT_EXTRAS = f"""
import importlib, pkgutil, sys
import torchmetrics  # which looks, as Lightning does, whether torchvision is there
missing = [n for n in sys.modules if n.partition(".")[0] in {EXTRAS}]
sys.modules.update(dict.fromkeys([*{EXTRAS}, *missing]))
import lightning_bnn, weightsym
for package in (lightning_bnn, weightsym):
    for found in pkgutil.walk_packages(package.__path__, f"{{package.__name__}}."):
        if not found.name.startswith("lightning_bnn.sklearn"):
            importlib.import_module(found.name)
print("imported")
"""
AFTER_TORCH = {
    "light": IMPORTED.format(
        ", ".join(f"lightning_bnn.{name}" for name in ("params", "models", "symmetry", "cli"))
    ),
    "methods": IMPORTED.format("lightning_bnn.methods"),
    "submodules": SUBMODULES,
}
AFTER_LIGHTNING = {
    "one callback": FROM_CALLBACKS.format("PermutationTau"),
    "all callbacks": FROM_CALLBACKS.format(", ".join(callbacks.__all__)),
    "without extras": WITHOUT_EXTRAS,
}


@pytest.fixture(scope="module")
def printed():
    """The words that each of these programs prints."""
    ends = fresh(torch=[*AFTER_TORCH.values()], lightning=[*AFTER_LIGHTNING.values()])
    names = [*AFTER_TORCH, *AFTER_LIGHTNING]
    return {name: text.split() for name, (_, text) in zip(names, ends, strict=True)}


def test_the_package_itself_does_not_even_import_torch():
    code = [sys.executable, "-c", IMPORTED.format("lightning_bnn")]
    done = subprocess.run(code, capture_output=True, text=True, check=True)
    assert not {"torch", "lightning"} & set(done.stdout.split())


def test_heavy_dependencies_are_imported_where_they_are_used(printed):
    assert not HEAVY & set(printed["light"])
    assert "lightning" not in printed["methods"]


def test_submodules_hide_no_function(printed):
    assert printed["submodules"] == ["mmd", "lightning_bnn.metrics.mmd", "True", "False"]


@pytest.mark.parametrize(("name", "most"), [("one callback", 8), ("all callbacks", 20)])
def test_callbacks_import_the_symmetries_and_few_other_files(name, most, printed):
    """Figures, banks and the doctor are imported once a run needs them."""
    files = [module for module in printed[name] if module.startswith("lightning_bnn")]
    assert "lightning_bnn.callbacks.permutation_tau" in files
    assert len(files) <= most, files


def test_saved_symmetries_can_be_read_by_torch_once_the_package_is_imported(tmp_path):
    """Classes must be known to be safe, although the package imports what it exports later."""
    import torch

    from weightsym import discover

    file = tmp_path / "sym.pt"
    torch.save(discover(torch.nn.Linear(2, 3), torch.randn(4, 2)), file)
    read = f"import torch; print(type(torch.load({str(file)!r}, weights_only=True)).__name__)"
    (_, known), (refused, _) = fresh(torch=[f"import weightsym; {read}", read])
    assert known.split() == ["Symmetries"]
    assert refused == 1


def test_every_file_is_imported_without_extras(printed):
    assert printed["without extras"][-1] == "imported"

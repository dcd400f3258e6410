"""Print the version of all packages, which every file that states one must have.

python .ci/versions.py         of this checkout
python .ci/versions.py v0.1.0  and of this tag
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STATED = {
    "lightning_bnn/__init__.py": r'^__version__ = "(.+)"',
    "weightsym/weightsym/__init__.py": r'^__version__ = "(.+)"',
    "bnn-data/lightning_bnn_data/__init__.py": r'^__version__ = "(.+)"',
    "research/bnn_research/__init__.py": r'^__version__ = "(.+)"',
    "fast/weightsym_fast/__init__.py": r'^__version__ = "(.+)"',
    "fast/pyproject.toml": r'^    "weightsym==(.+)"',
    "pyproject.toml": r'^    "weightsym==(.+)"',
    "CITATION.cff": r"^version: (.+)",
    "CHANGELOG.md": r"^## (\d[\d.]*)",
    ".zenodo.json": r'^  "version": "(.+)"',
    "recipe/lightning_bnn/recipe.yaml": r'^  version: "(.+)"',
    "recipe/weightsym-fast/recipe.yaml": r'^  version: "(.+)"',
    "recipe/weightsym/recipe.yaml": r'^  version: "(.+)"',
}
"""Where the version is stated, first of all."""


def versions(root=ROOT):
    """The version that each file states, None if it states none."""
    found = {}
    for name, pattern in STATED.items():
        match = re.search(pattern, (root / name).read_text(encoding="utf-8"), re.MULTILINE)
        found[name] = match and match[1]
    return found


if __name__ == "__main__":
    found = versions()
    if len(sys.argv) > 1:
        found["the tag"] = sys.argv[1].removeprefix("v")
        if "not released yet" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"):
            sys.exit("CHANGELOG.md has no date of the release.")
    if len(set(found.values())) != 1:
        sys.exit("Versions differ: " + str(found))
    print(found["pyproject.toml"])

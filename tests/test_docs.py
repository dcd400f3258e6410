"""What the docs show can be pasted, page by page; what they name is there."""

import re

import pytest
from pages import PAGES, page, pasted

from lightning_bnn import datamodules, modules
from lightning_bnn.cli import STUDIES
from lightning_bnn.commands.presets import preset_names

WITH_CODE = [name for name in PAGES if "```python" in page(name)]
TRAINING = "README.md", "docs/tour.md", "docs/modules.md", "docs/scale.md", "docs/sampling.md"
"""Pages that take some seconds."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.e2e) if n in TRAINING else n for n in WITH_CODE]
)
def test_a_page_can_be_pasted(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pasted(page(name), name)


# ------------------------------------------------------------ what pages name
def test_every_study_is_in_the_docs_with_its_papers():
    text = page("docs/studies.md")
    for name in STUDIES:
        assert f"`{name}`" in text or f"lightning-bnn {name}" in text
    claims = "".join(page(f"docs/p{k}.md") for k in (1, 2, 3))
    for name in STUDIES.keys() - {"demo", "calibrate"}:
        assert f"lightning-bnn {name}" in claims


def test_what_the_docs_name_is_there():
    text = page("docs/modules.md")
    for name in set(modules.__all__) - {"Prediction", "Predictive"}:
        assert name in text
    for name in re.findall(r"^\| `(\w+)`", text, re.MULTILINE):
        known = hasattr(datamodules, name) or hasattr(modules, name)
        assert known or name in preset_names()

"""Links between the pages lead somewhere."""

import pytest
from pages import PAGES, ROOT, TUTORIALS, dangling, page


@pytest.mark.parametrize(
    "name", [*PAGES, *TUTORIALS, "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"]
)
def test_files_and_headings_are_there(name):
    assert dangling(page(name), (ROOT / name).parent) == []


@pytest.mark.parametrize("target", ["docs/module.md", "docs/modules.md#chains", "#sampling"])
def test_a_link_to_nowhere_is_found(target):
    good = "# Title\n[file](README.md), [heading](docs/modules.md#conventions), [here](#title)\n"
    assert dangling(good, ROOT) == []
    assert dangling(f"{good}[nowhere]({target})", ROOT) == [target]

"""What a release consists of agrees: versions, metadata, recipes, and workflows that are pinned."""

import re
from collections import defaultdict

import pytest
import yaml
from packaging.requirements import Requirement
from pages import ROOT, script

versions = script(".ci/versions")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECTS = {"weightsym": "weightsym", "weightsym-fast": "fast", "lightning_bnn": "."}
UPLOADED = "weightsym", "weightsym_fast", "lightning_bnn", "lightning_bnn_data"
CONDA = {"torch": "pytorch", "matplotlib": "matplotlib-base"}
SIGNATURES = {"docstring_parser", "typeshed-client"}
"""What `jsonargparse[signatures]` brings, which conda has no extras for."""


def test_every_file_states_the_same_version():
    found = versions.versions()
    assert len(set(found.values())) == 1
    assert None not in found.values()


@pytest.mark.parametrize("name", PROJECTS)
def test_recipes_ask_for_what_wheels_ask_for(name):
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / PROJECTS[name] / "pyproject.toml").read_text("utf-8"))[
        "project"
    ]
    recipe = yaml.safe_load((ROOT / "recipe" / name / "recipe.yaml").read_text(encoding="utf-8"))
    expected = {"python": {f"<{project['requires-python'].rpartition('<')[2]}"}}
    for requirement in map(Requirement, project["dependencies"]):
        version = {str(part) for part in requirement.specifier}
        expected[CONDA.get(requirement.name, requirement.name)] = version
    found = {}
    for line in recipe["requirements"]["run"]:
        package, _, text = line.replace("${{ version }}", recipe["context"]["version"]).partition(
            " "
        )
        found[package] = {part for part in text.split(",") if part and "python_min" not in part}
    if "jsonargparse" in expected:
        expected |= dict.fromkeys(SIGNATURES, set())
    assert found == expected
    scripts = [" = ".join(pair) for pair in project.get("scripts", {}).items()]
    assert recipe["build"].get("python", {}).get("entry_points", []) == scripts
    assert recipe["about"]["summary"] == project["description"]
    assert recipe["about"]["license"] == project["license"]


def test_actions_are_pinned_by_their_commit():
    pins = defaultdict(set)
    for workflow in WORKFLOWS:
        text = workflow.read_text(encoding="utf-8")
        used = re.findall(r"uses: ([\w./-]+)@([0-9a-f]{40})  # (v\d+\.\d+\.\d+)\n", text)
        assert len(used) == text.count("uses:"), workflow.name
        for action, commit, version in used:
            pins[action].add((commit, version))
    assert len(pins) == 6
    assert all(len(found) == 1 for found in pins.values()), pins


def test_nothing_is_uploaded_before_it_was_tried():
    content = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))
    jobs = content["jobs"]
    assert content["permissions"] == {}
    assert content[True] == {"push": {"tags": ["v*"]}}  # YAML reads `on` as true
    assert [jobs[name]["needs"] for name in ("try", "attest", *UPLOADED)] == [
        "build", "try", "attest", "weightsym", "weightsym", "attest",
    ]  # fmt: skip
    for name, settings in jobs.items():
        uploads = any("pypi-publish" in step.get("uses", "") for step in settings["steps"])
        assert uploads == (settings.get("environment") == "pypi") == (name in UPLOADED)
        assert ("id-token" in settings["permissions"]) == (uploads or name == "attest")
        assert (settings["permissions"].get("contents") == "write") == (name == "page")
        for step in settings["steps"]:  # what a tag is called is no code
            assert "${{ github.ref" not in step.get("run", "")
    commands = [s.get("run", "") for job in ("build", "try") for s in jobs[job]["steps"]]
    assert sum(".ci/release" in command for command in commands) == 2
    assert any("verify-tag" in command for command in commands)

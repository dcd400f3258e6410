"""What a release consists of agrees: versions, metadata, recipes, and workflows that are pinned."""

import json
import re
import shutil
from collections import defaultdict

import pytest
import yaml
from packaging.requirements import Requirement
from pages import ROOT, script

versions = script(".ci/versions")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
PROJECTS = {"weightsym": ROOT / "weightsym", "lightning_bnn": ROOT}
CONDA = {"torch": "pytorch", "matplotlib": "matplotlib-base"}
SIGNATURES = {"docstring_parser", "typeshed-client"}
"""What `jsonargparse[signatures]` brings, which conda has no extras for."""


def test_every_file_states_the_same_version():
    found = versions.versions()
    assert len(set(found.values())) == 1
    assert None not in found.values()


@pytest.mark.parametrize("name", versions.STATED)
def test_another_version_in_one_file_is_noticed(name, tmp_path):
    for file in versions.STATED:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    text = (tmp_path / name).read_text(encoding="utf-8")
    version = versions.versions()[name]
    changed = re.sub(
        versions.STATED[name], lambda m: m[0].replace(version, "9.9"), text, flags=re.MULTILINE
    )
    (tmp_path / name).write_text(changed, encoding="utf-8")
    found = versions.versions(tmp_path)
    assert found.pop(name) == "9.9"
    assert set(found.values()) == {version}


def test_zenodo_says_what_the_citation_says():
    zenodo = json.loads((ROOT / ".zenodo.json").read_text(encoding="utf-8"))
    assert zenodo["title"] == CITATION["title"]
    assert zenodo["description"] == " ".join(CITATION["abstract"].split())
    assert zenodo["keywords"] == CITATION["keywords"]
    assert zenodo["license"] == CITATION["license"]
    assert [c["name"] for c in zenodo["creators"]] == [a["name"] for a in CITATION["authors"]]
    papers = [related["identifier"] for related in zenodo["related_identifiers"]]
    assert papers == [reference["url"] for reference in CITATION["references"]]


@pytest.mark.parametrize("name", PROJECTS)
def test_recipes_ask_for_what_wheels_ask_for(name):
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((PROJECTS[name] / "pyproject.toml").read_text("utf-8"))["project"]
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
    assert {package: found.pop(package) for package in SIGNATURES} == dict.fromkeys(
        SIGNATURES, set()
    )
    assert found == expected
    scripts = [" = ".join(pair) for pair in project["scripts"].items()]
    assert recipe["build"]["python"]["entry_points"] == scripts
    assert recipe["about"]["summary"] == project["description"]
    assert recipe["about"]["license"] == project["license"]


def steps(workflow):
    content = yaml.safe_load(workflow.read_text(encoding="utf-8"))
    return {job: settings["steps"] for job, settings in content["jobs"].items()}


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
    needs = {name: settings.get("needs", []) for name, settings in jobs.items()}
    assert needs == {
        "build": [], "try": "build", "attest": "try", "weightsym": "attest",
        "lightning_bnn": "weightsym", "site": "try", "page": ["lightning_bnn", "site"],
    }  # fmt: skip
    assert content["permissions"] == {}
    assert content[True] == {"push": {"tags": ["v*"]}}  # YAML reads `on` as true
    for name, settings in jobs.items():
        uploads = any("pypi-publish" in step.get("uses", "") for step in settings["steps"])
        assert uploads == (settings.get("environment") == "pypi") == (name in PROJECTS)
        assert ("id-token" in settings["permissions"]) == (uploads or name == "attest")
        assert (settings["permissions"].get("contents") == "write") == (name == "page")
        checkouts = [
            step["with"] for step in settings["steps"] if "checkout@" in step.get("uses", "")
        ]
        assert all(c["persist-credentials"] == (name == "page") for c in checkouts)
        for step in settings["steps"]:  # what a tag is called is no code
            assert "${{ github.ref" not in step.get("run", "")
    assert jobs["try"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
    commands = [s.get("run", "") for job in ("build", "try") for s in jobs[job]["steps"]]
    assert sum(".ci/release" in command for command in commands) == 2
    assert any("verify-tag" in command for command in commands)


def test_no_page_promises_what_is_not_on_an_index_yet():
    """Until the changelog has a date: `pip install` of our names is of a folder."""
    if "not released yet" not in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"):
        pytest.skip("it is")
    pages = [ROOT / "README.md", ROOT / "weightsym" / "README.md", *(ROOT / "docs").glob("**/*.md")]
    promised = re.compile(r"pip install (?:-\S+ )*['\"]?(?:lightning[-_]bnn|weightsym)\b")
    for page in pages:
        assert not promised.search(page.read_text(encoding="utf-8")), page
    assert promised.search("pip install 'lightning_bnn[ray]'")
    assert not promised.search("pip install -e ./weightsym -e '.[all]'")

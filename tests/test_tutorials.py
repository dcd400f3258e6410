"""Tutorials: their pages show their scripts, and what they claim is what comes out."""

import re
import sys
from pathlib import Path

import pytest
import torch
from pages import ROOT, blocks, page

from lightning_bnn import metrics as M

sys.path.insert(0, str(ROOT / "examples" / "tutorials"))
import build

NAMES = build.names()
OUTPUT = re.compile(r"^(?:```text\n.*?^```|!\[[^\]]*\]\(\S+\))\n\n", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]\d+)?")


def without_output(text):
    return OUTPUT.sub("", text)


def shape(text):
    """An output without its numbers and spaces, which may differ from machine to machine."""
    return " ".join(NUMBER.sub("#", text).split())


def shown(name):
    return [block.text for block in blocks(page(name)) if block.language == "text"]


# ------------------------------------------------------------ pages and scripts
@pytest.mark.parametrize("name", NAMES)
def test_pages_show_prose_and_code_of_their_scripts(name):
    text = page(f"docs/tutorials/{name}.md")
    cells = build.cells(build.script(name))
    assert without_output(text) == build.page(name, [build.Result()] * len(cells))
    assert {block.language for block in blocks(text)} == {"python", "text"}
    assert without_output(text) != text


@pytest.mark.parametrize("name", NAMES)
def test_pages_show_all_of_their_pictures(name):
    linked = re.findall(r"!\[[^\]]+\]\((\S+)\)", page(f"docs/tutorials/{name}.md"))
    there = [path.name for path in (ROOT / "docs" / "tutorials").glob(f"{name}_*.png")]
    assert sorted(linked) == sorted(there) != []


# ------------------------------------------------------------ what they claim
def callbacks(names):
    tau, gap = names["tau"].history, names["gap"].history
    assert max(tau[0][1]) < 0.98
    assert min(tau[-1][1]) > 0.995
    assert gap[0][1][2] > gap[-1][1][2] > gap[9][1][2] > 0


def posterior(names):
    posteriors, sampled, sets = names["posteriors"], names["sampled"], names["sets"]
    x, y = sets["test"]
    assert min((m(x).argmax(-1) == y).float().mean() for m in posteriors.values()) > 0.9
    wrong = names["wrong"]
    assert wrong[:45].float().mean() > 4 * wrong[45:].float().mean()
    for module in (posteriors["ensemble"], posteriors["VI"]):
        of = [M.mutual_information(sampled(module, sets[s][0])).mean() for s in ("test", "noise")]
        assert of[1] > 3 * of[0]
        score = M.mutual_information_score
        assert min(names["detection"](module, score, s) for s in ("inverted", "noise")) > 0.98
    calibration = names["calibration"]  # of VI, which is not sure enough
    assert calibration.calibrator.value < 0.8
    assert M.nll(calibration.probs(x), y) < 0.9 * M.nll(posteriors["VI"](x), y)
    assert names["coverage"] > 0.93  # of sets for 99 %


def table(file):
    """Values and errors of a table that a tutorial has written, by row and column."""
    header, *rows = (line.split(",") for line in Path(file).read_text().splitlines())
    return {row[0]: dict(zip(header, row, strict=True)) for row in rows}


def comparing(names):
    assert names["raw"] > 1 > 20 * names["removed"]
    laws = table("compared/distances.csv")
    for name in ("Again", "Late"):
        assert abs(float(laws[name]["law"])) < 3 * float(laws[name]["law (error)"])
    assert float(laws["Short"]["law"]) > 2 * float(laws["Short"]["law (error)"])
    assert float(laws["Short"]["TV"]) > 5 * float(laws["Late"]["TV"])
    scored = table("scored/fidelity.csv")
    chains, ours = (scored[name] for name in ("Chains", "Ours"))
    assert float(chains["function law"]) < 3 * float(chains["function law (error)"])
    assert float(ours["function law"]) > 10
    assert float(ours["TV"]) < float(chains["TV"]) + 1


def symmetries(names):
    assert names["distance"](*names["forms"]) < 1e-3
    assert min(names["least"].excess) > 5
    panels = names["panels"]
    for kind, most in (("two perceptrons", 0.3), ("two residual networks", 0.8)):
        lines = panels[kind]
        assert lines["matched"].height < most * lines["as trained"].height
    transformers = panels["two transformers"]
    heights = [line.height for line in transformers.values()]
    assert max(heights[2:]) < 0.4 * min(heights[:2])
    stack, aligned = (
        names["stack"],
        names["alignment"].apply(
            names["stack"], names["discover"](names["network"], names["x"][:2])
        ),
    )
    means = [{n: t.mean(0) for n, t in networks.items()} for networks in (stack, aligned)]
    raw, matched = (names["accuracy"](names["network"], mean) for mean in means)
    assert raw < 0.5 < 0.9 < matched
    assert (names["change"] < 1e-3) & (names["error"] < 1e-6)


def populations(names):
    forms = names["forms"]
    above = [float((pair[:, 0] > pair[:, 1]).double().mean()) for pair in forms.values()]
    assert above == pytest.approx([0.5, 0.5, 0], abs=0.03)
    found = names["found"]
    assert found.accuracy.quantile(0.8) < names["together"] < found.accuracy.max()
    curve = torch.tensor(names["curve"])
    assert bool((curve[:, 0].diff() < 0).all())
    assert curve[0, 1] > 3 * curve[-1, 1]
    assert curve[0, 0] - curve[2, 0] > 0.7 * (curve[0, 0] - curve[-1, 0])
    assert names["pairs"].min() > 0.001


CLAIMS = dict(zip(NAMES, (callbacks, posterior, comparing, symmetries, populations), strict=True))


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("undrawn")
def test_tutorials_print_what_their_pages_show(name, tmp_path, monkeypatch):
    results, names = build.run(name, tmp_path)
    printed = [result.printed for result in results if result.printed]
    assert [shape(text) for text in printed] == [
        shape(text) for text in shown(f"docs/tutorials/{name}.md")
    ]
    monkeypatch.chdir(tmp_path)
    CLAIMS[name](names)

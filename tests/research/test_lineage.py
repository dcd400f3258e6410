"""The table of lineage at its smallest, and the published tests by what they see through."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from shell import failure
from small_runs import assert_published, called, numbers

import weightsym
from bnn_research.cli import main
from bnn_research.families import FAMILIES, Scale, Transformer, adapted, family
from bnn_research.lineage import auc, digest, true_positives
from bnn_research.rivals import RIVALS, Names, Suspect
from weightsym import Element, discover, fold_networks
from weightsym import params as P

pytestmark = pytest.mark.filterwarnings("ignore")
SMALLEST = ["--networks", "2", "--width", "16", "--hidden", "24", "--steps", "2"]


NAMES = Names([f"layers.{k}" for k in range(2)], [f"layers.{k}.up.weight" for k in range(2)],
              "embed.weight", gated=True)  # fmt: skip
TOKENS = torch.randint(20, (8, 32), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def suspects():
    """A gated network without gains, a disguised copy, and another network."""
    torch.manual_seed(0)
    nets = [Transformer(16, 24, outputs=20, gated=True).eval() for _ in range(2)]
    module, (a, b) = fold_networks(nets[0], [P.of(net) for net in nets], TOKENS)
    sym = discover(module, TOKENS)
    moved = Element.random(sym, torch.Generator().manual_seed(1))(a)
    networks = [{n: t.detach() for n, t in w.items()} for w in (a, moved, b)]
    return [Suspect.of(module, w, NAMES, TOKENS) for w in networks]


# ------------------------------------------------------------ published tests
def test_every_score_is_largest_for_a_network_and_itself(suspects):
    a, _, b = suspects
    own = {name: score(a, a) for name, score in RIVALS.items()}
    other = {name: score(b, a) for name, score in RIVALS.items()}
    assert all(own[name] == pytest.approx(1, abs=1e-4) for name in RIVALS if "phi" not in name)
    assert all(own[name] > other[name] + 0.01 for name in RIVALS)
    assert max(other["phi_U"], other["phi_MATCH"]) < 3 < 10 < min(own["phi_U"], own["phi_MATCH"])


def test_a_disguise_is_seen_through_by_invariants_and_by_activations_alone(suspects):
    a, moved, _ = suspects
    torch.testing.assert_close(moved.outputs["layers.1"].norm(), a.outputs["layers.1"].norm())
    found = {name: score(moved, a) for name, score in RIVALS.items()}
    assert found["HuRef ICS"] == pytest.approx(1, abs=1e-3)
    assert found["REEF"] == pytest.approx(1, abs=1e-3)
    assert found["phi_MATCH"] < 10  # units of the upper map may be flipped, gates not
    assert found["phi_U"] < 3
    assert found["HuRef PCS"] < 0.5
    assert found["spectra"] < 0.99


def test_awm_follows_exchanged_and_flipped_dimensions_but_no_rotations(suspects):
    a, moved, _ = suspects
    g = torch.Generator().manual_seed(2)
    order, signs = torch.randperm(16, generator=g), torch.randn(16, generator=g).sign()
    turn = torch.linalg.qr(torch.randn(16, 16, generator=g)).Q
    params = {**a.params, "embed.weight": a.params["embed.weight"][:, order] * signs}
    for name in (f"{layer}.{part}.weight" for layer in NAMES.layers for part in "qk"):
        params[name] = turn @ (a.params[name][:, order] * signs)
    awm = RIVALS["AWM"]
    assert awm(Suspect(params, {}, NAMES), a) == pytest.approx(1, abs=1e-4)
    assert awm(moved, a) < 0.9


# ------------------------------------------------------------ children
def test_a_lora_holds_the_largest_directions_of_a_change():
    w, tuned = torch.randn(2, 12, 6, 3, 3, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(adapted(w, tuned, 12), tuned, atol=1e-5)
    change = (adapted(w, tuned, 4) - w).flatten(1)
    left = (tuned - w).flatten(1)
    assert torch.linalg.matrix_rank(change) == 4
    sizes = torch.linalg.svdvals(left)
    assert (left - change).square().sum() == pytest.approx(
        float(sizes[4:].square().sum()), rel=1e-4
    )
    assert torch.equal(adapted(w[0, 0, 0, 0], tuned[0, 0, 0, 0]), w[0, 0, 0, 0])


# ------------------------------------------------------------ the table
def test_rates_of_scores():
    assert auc([3.0, 2.0], [1.0, 2.0]) == pytest.approx(0.875)
    assert true_positives([3.0, 2.0, 0.0], [1.0, 2.0]) == pytest.approx(100 / 3)


def test_runs_of_other_code_are_told_apart(tmp_path, monkeypatch):
    settings, copied = Scale(2, 16, 24, 2, 40), tmp_path / "weightsym"
    before = digest(settings, 0)
    assert len({before, digest(settings, 1), digest(replace(settings, steps=3), 0)}) == 3
    shutil.copytree(Path(weightsym.__file__).parent, copied)
    monkeypatch.setattr(weightsym, "__file__", str(copied / "__init__.py"))
    assert digest(settings, 0) == before
    with (copied / "matching" / "relation.py").open("a") as file:
        file.write("# changed")
    assert digest(settings, 0) != before


@pytest.mark.parametrize("name", FAMILIES)
def test_every_score_is_defined_where_a_family_has_what_it_reads(name, data):
    every = family(name, Scale(2, 16, 24, 2, 40))
    net = every.make().eval()
    a = Suspect.of(net, P.of(net), every.names, every.held[0])
    undefined = {n for n, score in RIVALS.items() if math.isnan(score(a, a))}
    gated, attention = {"phi_MATCH"}, {"HuRef ICS", "AWM"}
    plain = gated | attention
    wanted = {"Llama": set(), "CNN": plain, "MLP": plain}.get(name, gated)
    assert undefined == wanted
    assert 0 <= every.accuracy(net, P.of(net)) <= 100


@pytest.mark.e2e
def test_children_of_small_networks_are_found(data, tmp_path):
    (tmp_path / "here").mkdir()
    line = ["lineage", "--families", "[CNN]", *SMALLEST, "--out", "out"]
    text = called(main, tmp_path / "here", line)
    out = tmp_path / "here" / "out"
    assert_published(out, "lineage", text)
    rows = {row["attack"]: row for row in numbers(out, "auc")}
    assert rows["all symmetries"]["units found twice"] == 1
    assert rows["none"]["HuRef PCS"] == 1 > rows["all symmetries"]["HuRef PCS"]
    left = {row["child"]: row["attacked: left"] for row in numbers(out, "children")}
    assert left["int8"] < left["pruned, 60 %"] < left["distilled"]
    (file,) = out.glob("CNN-*.json")
    rows = json.loads(file.read_text())
    file.write_text(json.dumps([{**rows[0], "left": 7.0}, *rows[1:-2]]))  # as if it was stopped
    called(main, tmp_path / "here", line)
    again = json.loads(file.read_text())
    assert [row["left"] for row in again] == [7.0, *(row["left"] for row in rows[1:])]
    assert numbers(out, "children")[0]["left"] == 7


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (
            ["--families", "[RNN]"],
            "`families` must be some of Llama, GPT-2, ViT, CNN, MLP, got 'RNN'",
        ),
        (["--networks", "1"], "`networks` must be at least 2, got 1"),
    ],
)
def test_mistakes_are_refused(args, sentence, capsys, tmp_path):
    assert sentence in failure(capsys, "lineage", *args, "--out", str(tmp_path), script=main)

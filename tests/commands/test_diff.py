"""`lightning-bnn diff` as a user calls it."""

import itertools
import json
import re

import pytest
import torch
from disk_networks import NORMED, PLAIN, drawn, known, normed, orders, plain, write
from PIL import Image
from shell import code_of, failure
from torch import nn

from weightsym import Difference, Relation, SharedUnits, random_scales, rescale
from weightsym import params as P
from weightsym.commands.diff import EXIT_CODES, rounding_of, verdict_of
from weightsym.matching.difference import Stage

SAME, COPY, PARTS, APART, UNKNOWN = EXIT_CODES.values()


@pytest.fixture(autouse=True)
def _read_once(monkeypatch):
    monkeypatch.setattr("weightsym.commands.diff.symmetries_in", known)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A network, an orbit element, one that was trained on, an independent one, and others."""
    folder, net = tmp_path_factory.mktemp("networks"), drawn(plain)
    state, sym = P.of(net), known(net, torch.randn(2, 4))
    scales = random_scales(sym, torch.Generator().manual_seed(1))
    moved = rescale(orders(net, 1), sym, scales)
    states = {
        "b": state,
        "moved": moved,
        "tuned": {n: t + 0.03 * torch.randn_like(t) for n, t in moved.items()},
        "other": P.of(drawn(plain, 5)),
        "wide": {n: t.bfloat16().float() for n, t in state.items()},
        "more": {**state, "ema.decay": torch.ones(4)},
        "nan": {**state, "3.bias": state["3.bias"] * torch.nan},
    }
    for name, each in states.items():
        write(folder / f"{name}.safetensors", each)
    write(folder / "rough.safetensors", orders(net, 1), torch.bfloat16)
    return folder


def compared(files, a, *more):
    return code_of("diff", files / f"{a}.safetensors", files / "b.safetensors", *PLAIN, *more)


# ------------------------------------------------------------ verdicts
MOVED = (
    "parameters: 104 in 6 tensors (float32)",
    "one orbit is possible",
    "verdict: the same function, up to symmetries and rounding",
)
CASES = {
    "moved": (SAME, MOVED, ["different orbits"]),
    "tuned": (COPY, ["different orbits", "verdict: one was made from the other"], []),
    "other": (UNKNOWN, ["too few units of these networks can be compared"], []),
    "more": (SAME, ["not compared, since not of the network"], []),
    # a copy in bfloat16 is the same up to its rounding; as much noise in float32 is not
    "rough": (SAME, ["other words, which rounding of the files explains"], ["different orbits"]),
    "wide": (COPY, ["different orbits"], ["outputs do not"]),
}


@pytest.mark.parametrize("name", CASES)
def test_verdicts(name, files, capsys):
    code, words, others = CASES[name]
    assert compared(files, name) == code
    out = capsys.readouterr().out
    assert all(text in out for text in words)
    assert not any(text in out for text in others)
    if name == "moved":
        assert re.search(r"^as stored +\S+ +\S+$", out, re.M)
        shares = re.findall(r"^(?:least mass|units in order) .* (\S+) %$", out, re.M)
        assert sum(map(float, shares)) > 99.8  # least mass may put networks farther apart
        assert re.search(r"^outputs on random inputs differ by \S+e-0[678]", out, re.M)


@pytest.mark.parametrize("name", ["moved", "tuned"])
def test_numbers_alone_are_those_of_the_file(name, files, tmp_path, capsys):
    code, words, _ = CASES[name]
    assert compared(files, name, "--json", "--out", tmp_path / "diff.json") == code
    said = capsys.readouterr()
    whole = json.loads((tmp_path / "diff.json").read_text())
    assert json.loads(said.out) == {k: v for k, v in whole.items() if k != "version"}
    assert all(text in said.err for text in words)
    assert compared(files, name, "--quiet") == code
    assert capsys.readouterr().out == ""


def test_exit_codes_and_rounding_stay_what_they_are():
    assert (SAME, COPY, PARTS, APART, UNKNOWN) == (0, 3, 3, 4, 5)
    assert rounding_of([torch.float32, torch.bfloat16, torch.int64]) == 2**-7
    assert rounding_of([torch.float32]) == rounding_of([torch.float64]) == 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_equal_files_are_not_matched(files, dtype, tmp_path, capsys, monkeypatch):
    """Nor are copies in another type, unless they hold as much noise in the type of both."""
    monkeypatch.setattr("weightsym.commands.diff.relation", lambda *_, **__: 1 / 0)
    state, b = P.of(drawn(plain)), str(files / "b.safetensors")
    assert code_of("diff", write(tmp_path / "a.safetensors", state, dtype), b, *PLAIN) == 0
    assert "every tensor is the same" in capsys.readouterr().out
    noisy = {n: t.bfloat16().float() * (1 + 1e-6) for n, t in state.items()}
    with pytest.raises(ZeroDivisionError):
        code_of("diff", write(tmp_path / "n.safetensors", noisy), b, *PLAIN)


def test_other_statistics_are_another_function(tmp_path, capsys):
    state = P.of(drawn(normed))
    other = {n: t + 0.5 if "running" in n else t for n, t in state.items()}
    names = [write(tmp_path / f"{k}.safetensors", s) for k, s in enumerate((state, other))]
    assert code_of("diff", *names, *NORMED) == COPY
    said = capsys.readouterr().out
    assert "weights agree up to symmetries and rounding, but outputs do not" in said


@pytest.mark.parametrize(
    ("rest", "outputs", "p", "verdict"),
    [
        (1e-6, 1e-5, 1e-9, "same function"),
        (1e-6, float("nan"), 1e-9, "same function"),
        (1e-6, 0.1, 1e-9, "made from it"),
        (3e-6, 1e-5, 1e-9, "made from it"),
        (0.63, 1.0, 1e-7, "made from it"),
        (0.63, 1.0, 1e-5, "independent"),
    ],
)
def test_verdicts_by_their_numbers(rest, outputs, p, verdict):
    found = Difference((Stage("", {"w": rest**2}, {"w": 1.0}),), ({}, {}), (), {})
    groups = (SharedUnits("w", 64, 1, 3),)
    for ps in itertools.permutations((1.0, 1.0, p)):
        unlikely = verdict == "independent" and ps[1] < 0.05  # of units that agree
        wanted = "cannot be told" if unlikely else verdict
        assert verdict_of(Relation(found, groups, *ps), outputs, 2e-6) == wanted
    few = Relation(found, (SharedUnits("w", 4, 1, 3),), 1.0, 1.0, 1.0)
    assert (verdict_of(few, 1.0, 2e-6) == "cannot be told") == (rest > 0.1)


# ------------------------------------------------------------ other shapes, several parents
def wider(hidden):
    return nn.Sequential(nn.Linear(20, hidden), nn.ReLU(), nn.Linear(hidden, 12))


def test_a_pruned_network_and_weights_of_parents(tmp_path, monkeypatch, capsys, caplog):
    monkeypatch.setattr("disk_networks.wider", wider, raising=False)
    nets = [P.of(drawn(lambda: wider(48), seed)) for seed in range(3)]
    kept = torch.randperm(48, generator=torch.Generator().manual_seed(0))[:32]
    left = {n: t if n == "2.bias" else t[..., kept] if n == "2.weight" else t[kept]
            for n, t in nets[0].items()}  # fmt: skip
    merged = {n: 0.3 * t + 0.7 * nets[1][n] for n, t in nets[0].items()}
    every = [*nets, left, merged]
    a, b, c, small, child = (write(tmp_path / f"{k}.safetensors", w) for k, w in enumerate(every))
    line = ["--network", "disk_networks.wider", "--input", "2,20", "--init.hidden", "48"]
    other = [*line[:-1], "32", "--init_b.hidden", "48"]
    for first, second, options in ((a, small, [*line, "--init_b.hidden", "32"]), (small, a, other)):
        assert code_of("diff", first, second, *options) == PARTS
        assert "shared: 32 of 48 of 0.weight" in capsys.readouterr().out
    assert "incoming weight" not in caplog.text  # of zeros in place of units
    assert "(48, 20). If B has another size, `--init_b` takes" in failure(
        capsys, "diff", a, small, *line
    )
    assert "--init_b" not in failure(capsys, "diff", a, b, *other[:-2])  # of one shape
    assert code_of("diff", small, b, *other) == APART
    capsys.readouterr()
    assert code_of("diff", child, a, "--parents", f'["{b}", "{c}"]', *line, "--json") == COPY
    found = json.loads(capsys.readouterr().out)["parents"]
    assert list(found["weights"].values()) == pytest.approx([0.3, 0.7, 0], abs=1e-5)
    assert found["rest"] < 1e-5
    assert {*found["layers"]} == {"0", "2"}
    two = ["diff", small, b, *other, "--parents", f'["{c}"]']
    assert "`--data` and `--parents` need networks of one shape" in failure(capsys, *two)


# ------------------------------------------------------------ what is written
def test_numbers_and_a_figure_are_written(files, tmp_path, capsys):
    out, data, x = tmp_path / "diff.json", tmp_path / "data.pt", torch.randn(12, 4)
    torch.save({"inputs": x, "targets": drawn(plain)(x).argmax(1)}, data)
    assert compared(files, "tuned", "--out", out, "--data", data) == COPY
    printed = capsys.readouterr().out
    barriers = re.search(r"^barrier on 12 examples of \S+: (\S+) -> (\S+)$", printed, re.M)
    assert float(barriers[2]) < float(barriers[1])
    found = json.loads(out.read_text())
    assert found["verdict"] == "made from it"
    assert found["barriers"] == pytest.approx([float(b) for b in barriers.groups()], rel=1e-4)
    assert [s["name"] for s in found["stages"]] == ["as stored", "least mass", "units in order"]
    assert found["rest"] == found["stages"][-1]["relative"]
    assert [g["units"] for g in found["groups"]] == [7, 6]
    assert found["p"]["close"] < 1e-6 < found["p"]["robust"]
    assert set(found["stages"][0]["layers"]) == {"1", "3", "5"}
    assert set(found["fingerprints"]) <= set(re.findall(r"\w{8}-\w{8}", printed))
    assert found["settings"]["a"].endswith("tuned.safetensors")
    with Image.open(tmp_path / "diff.png") as picture:
        assert min(picture.size) > 300
    two = [files / "b.safetensors", files / "b.safetensors", *PLAIN, "--out", out]
    assert "`--overwrite true` replaces" in failure(capsys, "diff", *two)
    assert json.loads(out.read_text()) == found
    assert compared(files, "b", "--out", out, "--overwrite", "true") == 0
    assert json.loads(out.read_text())["rest"] == 0


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("a", "option", "message"),
    [
        ("nan", [], "'3.bias' holds NaN"),
        ("tuned", ["--out", "diff.txt"], "must be a .json file"),
        ("tuned", ["--out", "nowhere/diff.json"], "there is no folder nowhere"),
    ],
)
def test_mistakes_are_one_sentence(a, option, message, files, capsys):
    two = [files / f"{name}.safetensors" for name in (a, "b")]
    assert message in failure(capsys, "diff", *two, *PLAIN, *option)

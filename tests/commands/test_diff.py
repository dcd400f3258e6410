"""`lightning-bnn diff` as a user calls it."""

import json
import os
import re

import pytest
import torch
from disk_networks import NORMED, PLAIN, drawn, known, normed, orders, plain, write
from PIL import Image
from shell import code_of, failure

from weightsym import Difference, random_scales, rescale
from weightsym import params as P
from weightsym.commands.diff import EXIT_CODES, rounding_of, verdict_of
from weightsym.matching.difference import Stage

SAME, COPY, APART = EXIT_CODES.values()
FEW = ["--nulls", "3"]


@pytest.fixture(autouse=True)
def _read_once(monkeypatch):
    monkeypatch.setattr("weightsym.commands.diff.discover", known)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A network, an orbit element, one that was trained on, and an independent one."""
    folder, net = tmp_path_factory.mktemp("networks"), drawn(plain)
    sym = known(net, torch.randn(2, 4))
    scales = random_scales(sym, torch.Generator().manual_seed(1))
    moved = rescale(orders(net, 1), sym, scales)
    tuned = {n: t + 0.03 * torch.randn_like(t) for n, t in moved.items()}
    for name, state in {"b": P.of(net), "moved": moved, "tuned": tuned}.items():
        write(folder / f"{name}.safetensors", state)
    write(folder / "other.safetensors", P.of(drawn(plain, 5)))
    return folder


def compared(files, a, *more):
    return code_of("diff", files / f"{a}.safetensors", files / "b.safetensors", *PLAIN, *more)


# ------------------------------------------------------------ verdicts
def test_a_moved_copy_is_the_same_function(files, capsys):
    assert compared(files, "moved", *FEW) == SAME == 0
    out = capsys.readouterr().out
    assert "parameters: 104 in 6 tensors (float32)" in out
    assert re.search(r"^as stored +\S+ +\S+$", out, re.M)
    shares = re.findall(r"^(?:least mass|units in order) .* (-?\S+) %$", out, re.M)
    assert sum(map(float, shares)) == pytest.approx(100, abs=0.2)
    assert re.search(r"^outputs on random inputs differ by \S+e-0[678]", out, re.M)
    assert "one orbit is possible" in out
    assert out.rstrip().endswith("verdict: the same function, up to symmetries and rounding")


def test_copies_that_were_trained_on_and_others(files, capsys):
    assert compared(files, "tuned", *FEW) == COPY == 3
    out = capsys.readouterr().out
    assert "different orbits" in out
    assert "verdict: a copy that was trained on" in out
    assert compared(files, "other", *FEW) == APART == 4
    assert "verdict: independent networks" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_equal_files_are_not_matched(files, dtype, tmp_path, capsys, monkeypatch):
    """Nor are copies in another type, unless they hold as much noise in the type of both."""
    monkeypatch.setattr("weightsym.commands.diff.difference", lambda *_, **__: 1 / 0)
    state, b = P.of(drawn(plain)), str(files / "b.safetensors")
    assert code_of("diff", write(tmp_path / "a.safetensors", state, dtype), b, *PLAIN) == 0
    assert "every tensor is the same" in capsys.readouterr().out
    noisy = {n: t.bfloat16().float() * (1 + 1e-6) for n, t in state.items()}
    with pytest.raises(ZeroDivisionError):
        code_of("diff", write(tmp_path / "n.safetensors", noisy), b, *PLAIN)


def test_half_precision_explains_more(files, tmp_path, capsys):
    """A copy in bfloat16 is the same up to its rounding; as much noise in float32 is not."""
    state = P.of(drawn(plain))
    b = str(files / "b.safetensors")
    moved = orders(drawn(plain), 1)
    rough = write(tmp_path / "rough.safetensors", moved, torch.bfloat16)
    assert code_of("diff", rough, b, *PLAIN, *FEW) == SAME
    out = capsys.readouterr().out
    assert "other words, which rounding of the files explains" in out
    assert "different orbits" not in out
    wide = {n: t.bfloat16().float() for n, t in state.items()}
    assert code_of("diff", write(tmp_path / "w.safetensors", wide), b, *PLAIN, *FEW) == COPY
    out = capsys.readouterr().out
    assert "outputs do not" not in out
    assert "different orbits" in out
    assert rounding_of([torch.float32, torch.bfloat16, torch.int64]) == 2**-7
    assert rounding_of([torch.float32]) == rounding_of([torch.float64]) == 2e-6


def test_other_statistics_are_another_function(tmp_path, capsys):
    state = P.of(drawn(normed))
    other = {n: t + 0.5 if "running" in n else t for n, t in state.items()}
    names = [write(tmp_path / f"{k}.safetensors", s) for k, s in enumerate((state, other))]
    assert code_of("diff", *names, *NORMED, *FEW) == COPY
    assert "weights agree up to symmetries and rounding, outputs do not" in (
        capsys.readouterr().out
    )


def test_verdicts_by_their_numbers():
    def numbers(rest, kept=1):
        stage = Stage("", {"w": rest**2}, {"w": 1.0})
        nulls = tuple(Stage("", {"w": r**2}, {"w": 1.0}) for r in (0.9, 1.0, 1.1))
        return Difference((stage,), {}, {}, nulls, kept, 2, 64)

    assert verdict_of(numbers(1e-6), 1e-5, 2e-6) == "same function"
    assert verdict_of(numbers(1e-6), float("nan"), 2e-6) == "same function"
    assert verdict_of(numbers(1e-6), 0.1, 2e-6) == "copy that was trained on"
    assert verdict_of(numbers(3e-6), 1e-5, 2e-6) == "copy that was trained on"
    assert verdict_of(numbers(0.63), 1.0, 2e-6) == "copy that was trained on"
    assert verdict_of(numbers(0.64), 1.0, 2e-6) == "independent"
    assert verdict_of(numbers(0.95, kept=20), 1.0, 2e-6) == "copy that was trained on"


# ------------------------------------------------------------ what is written
def test_numbers_and_a_figure_are_written(files, tmp_path, capsys):
    out = tmp_path / "diff.json"
    x = torch.randn(12, 4)
    data = tmp_path / "data.pt"
    torch.save({"inputs": x, "targets": drawn(plain)(x).argmax(1)}, data)
    assert compared(files, "tuned", *FEW, "--out", out, "--data", data) == COPY
    printed = capsys.readouterr().out
    barriers = re.search(r"^barrier on 12 examples of \S+: (\S+) -> (\S+)$", printed, re.M)
    assert float(barriers[2]) < float(barriers[1])
    found = json.loads(out.read_text())
    assert found["verdict"] == "copy that was trained on"
    assert found["barriers"] == pytest.approx([float(b) for b in barriers.groups()], rel=1e-4)
    assert [s["name"] for s in found["stages"]] == ["as stored", "least mass", "units in order"]
    assert found["rest"] == found["stages"][-1]["relative"]
    assert len(found["unrelated"]) == 3
    assert set(found["stages"][0]["layers"]) == {"1", "3", "5"}
    assert set(found["fingerprints"]) <= set(re.findall(r"\w{8}-\w{8}", printed))
    assert found["settings"]["a"].endswith("tuned.safetensors")
    with Image.open(tmp_path / "diff.png") as picture:
        assert min(picture.size) > 300
    before = os.stat(out).st_mtime_ns
    assert "`--overwrite true` replaces" in failure(
        capsys, "diff", files / "b.safetensors", files / "b.safetensors", *PLAIN, "--out", out
    )
    assert os.stat(out).st_mtime_ns == before
    assert compared(files, "b", *FEW, "--out", out, "--overwrite", "true") == 0
    assert json.loads(out.read_text())["rest"] == 0


# ------------------------------------------------------------ mistakes
@pytest.mark.bad_input
def test_mistakes_are_one_sentence(files, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a, b = files / "tuned.safetensors", files / "b.safetensors"
    state = P.of(plain())
    broken = {n: t * float("nan") if n == "3.bias" else t for n, t in state.items()}
    nan = write(tmp_path / "nan.safetensors", broken)
    assert "'3.bias' holds NaN" in failure(capsys, "diff", nan, b, *PLAIN)
    assert "`nulls` must be at least 2" in failure(capsys, "diff", a, b, *PLAIN, "--nulls", "1")
    for out, message in (
        ("diff.txt", "must be a .json file"),
        ("nowhere/diff.json", "there is no folder nowhere"),
    ):
        assert message in failure(capsys, "diff", a, b, *PLAIN, "--out", out)


def test_what_is_none_of_the_network_is_named(files, tmp_path, capsys):
    state = {**P.of(drawn(plain)), "ema.decay": torch.ones(4)}
    a = write(tmp_path / "a.safetensors", state)
    assert code_of("diff", a, files / "b.safetensors", *PLAIN) == 0
    assert "not compared, since not of the network" in capsys.readouterr().out

"""`weightsym mergeable` and `weightsym rebase` as a user calls them."""

import json
import shlex

import pytest
import torch
from disk_networks import NORMED, PLAIN, drawn, factored, known, normed, orders, plain, write
from safetensors.torch import load_file
from shell import code_of, failure
from torch import nn

from lightning_bnn.cli import main
from weightsym import (
    Element,
    Meeting,
    Mergeable,
    discover,
    mergeable,
    mix,
    permute,
    random_mixings,
    random_permutations,
    rebase,
)
from weightsym import params as P
from weightsym.commands.mergeable import EXIT_CODES

PLAINLY, ALIGNED, NO, UNKNOWN = EXIT_CODES.values()
X = torch.randn(64, 4, generator=torch.Generator().manual_seed(5))


@pytest.fixture(autouse=True)
def _read_once(monkeypatch):
    monkeypatch.setattr("weightsym.commands.networks.discover", known)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A network, copies of it in other places and nearby, another one, and data."""
    folder, net = tmp_path_factory.mktemp("networks"), drawn(plain)
    state = P.of(net)
    states = {
        "net": state,
        "moved": orders(net, 1),
        "near": {n: t + 1e-3 for n, t in state.items()},
        "other": P.of(drawn(plain, 5)),
        "wide": {n: torch.zeros(9, *t.shape[1:]) for n, t in state.items()},
    }
    for name, each in states.items():
        write(folder / f"{name}.safetensors", each)
    torch.save({"inputs": X, "targets": 20 * net(X).detach()}, folder / "data.pt")
    return folder


# ------------------------------------------------------------ mergeable
CASES = {
    "near": (PLAINLY, "plain"),
    "moved": (ALIGNED, "reference"),
    "other": (NO, None),
    "wide": (NO, None),
}


@pytest.mark.parametrize("data", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_verdict_and_command(name, data, files, tmp_path, monkeypatch, capsys):
    code, method = CASES[name]
    monkeypatch.chdir(files)
    pair, more = [f"{name}.safetensors", "net.safetensors"], ["--data", "data.pt"] * data
    codes = {code} if data or name != "other" else {NO, UNKNOWN}
    assert code_of("mergeable", *pair, *PLAIN, *more, "--json") in codes
    found = json.loads(capsys.readouterr().out)
    if name == "wide":
        assert len(found["obstacles"]) == 6
        sizes = "other widths: '1.weight' has the shapes (9, 4) and (7, 4)"
        assert sizes in found["obstacles"]
        return
    frames = found["frames"]
    assert all((frame["barrier"] is not None) == data for frame in frames.values())
    plainly = cosine(f"{name}.safetensors", "net.safetensors")
    assert frames["plain"]["cosine"] == pytest.approx(plainly, abs=1e-6)
    if method is None:
        assert ("command" in found) == (found["verdict"] != "no")
        return
    assert frames[method]["cosine"] > 0.99
    program, *words = shlex.split(found["command"])
    assert program == "weightsym"
    main([*words, "--out", str(tmp_path / "merged.safetensors")])
    merged = P.apply(plain(), load_file(tmp_path / "merged.safetensors"), X)
    assert (merged - drawn(plain)(X)).abs().max() < 0.02


@pytest.mark.parametrize(
    ("cosines", "barriers", "verdict", "method"),
    [
        ((0.95, 0.99), (None, None), "as they are", "plain"),
        ((0.1, 0.95), (None, None), "in one frame", "reference"),
        ((0.1, 0.5), (None, None), "cannot be told", "reference"),
        ((0.1, 0.2), (None, None), "no", "reference"),
        ((0.1, 0.5), (2.0, 0.05), "in one frame", "reference"),
        ((0.99, 0.99), (0.3, 0.2), "no", "reference"),
        ((0.1, 0.99), (0.09, 0.01), "in one frame", "reference"),
        ((0.1, 0.99), (0.009, 0.001), "as they are", "plain"),
        ((0.1, 0.99), (0.09, 0.05), "as they are", "plain"),
        ((0.1, 0.2), (float("nan"), 3.0), "no", "reference"),
    ],
)
def test_data_decide_and_the_simplest_frame_wins(cosines, barriers, verdict, method):
    pairs = zip(("plain", "reference"), cosines, barriers, strict=True)
    still = Element(discover(nn.Linear(2, 2), torch.randn(8, 2)))
    found = Mergeable(tuple(Meeting(name, still, *pair) for name, *pair in pairs), None, 0.1)
    assert (found.verdict, found.best.method) == (verdict, method)


def cosine(path, other):
    """The least one of any matrix."""
    a, b = load_file(path), load_file(other)
    pairs = ((a[n].flatten(), b[n].flatten()) for n in a if a[n].ndim > 1)
    return min(float(torch.cosine_similarity(x, y, 0)) for x, y in pairs)


def test_statistics_and_tokenisers_are_named(tmp_path, capsys):
    net = drawn(normed)
    path = write(tmp_path / "a.safetensors", P.of(net))
    assert code_of("mergeable", path, path, *NORMED) == PLAINLY
    assert "in the way: the statistics of batch norms: --data" in capsys.readouterr().out
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
        write(folder / "model.safetensors", P.of(drawn(plain)))
        (folder / "config.json").write_text("{}")
        (folder / "vocab.json").write_text(f'{{"{folder.name}": 0}}')
    assert code_of("mergeable", *folders, *PLAIN) == PLAINLY
    assert "the tokenisers differ in vocab.json" in capsys.readouterr().out
    (folders[0] / "vocab.json").write_text('{"b": 0}')
    assert code_of("mergeable", *folders, *PLAIN) == PLAINLY
    assert "the tokenisers" not in capsys.readouterr().out


def test_other_tokens_are_told_from_other_widths(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("disk_networks.tokens", tokens, raising=False)
    for rows, width, words in ((7, 4, "other tokens or positions"), (5, 6, "other widths")):
        a = write(tmp_path / "a.safetensors", P.of(tokens()))
        b = write(tmp_path / "b.safetensors", P.of(tokens(rows, width)))
        line = ["--network", "disk_networks.tokens", "--input", "2,3:int64"]
        assert code_of("mergeable", a, b, *line) == NO
        assert f"in the way: {words}: '0.weight' has the shapes (5, 4)" in capsys.readouterr().out


def tokens(rows=5, width=4):
    return nn.Sequential(nn.Embedding(rows, width), nn.Linear(width, 3))


def test_matrices_are_tried_where_they_act():
    net = drawn(factored)
    sym = known(net, X)
    mixed = mix(P.of(net), sym, random_mixings(sym, torch.Generator().manual_seed(1)))
    found = mergeable(mixed, P.of(net), sym, model=net, batches=[(X, net(X).detach())],
                      loss=nn.functional.mse_loss, tolerance=1e-6)  # fmt: skip
    assert [m.method for m in found.meetings] == ["plain", "reference", "mixing"]
    assert (found.verdict, found.best.method) == ("in one frame", "mixing")
    heights = [m.barrier for m in found.meetings]
    assert heights[2] < 1e-6 < min(heights[:2])


# ------------------------------------------------------------ rebase
def bases(build, noise):
    """A base, a network that was tuned from it, and the base elsewhere."""
    net = drawn(build)
    sym, old = known(net, X), P.of(net)
    generator = torch.Generator().manual_seed(2)
    order = random_permutations(sym, generator)
    tuned = {n: t + 0.1 * torch.randn(t.shape, generator=generator) if t.is_floating_point() else t
             for n, t in old.items()}  # fmt: skip
    new = {n: t + noise * torch.randn(t.shape, generator=generator) if P.is_weight(n, t) else t
           for n, t in permute(old, sym, order).items()}  # fmt: skip
    return sym, order, tuned, old, new


@pytest.mark.parametrize("scale", [1.0, -0.5])
@pytest.mark.parametrize("build", [plain, normed])
def test_the_change_moves_with_the_units(build, scale):
    sym, order, tuned, old, new = bases(build, 0.01)
    moved = rebase(tuned, old, new, sym, scale=scale)
    plainly = rebase(tuned, old, new, sym, scale=scale, method="plain")
    change = {n: tuned[n] - t if P.is_weight(n, t) else torch.zeros_like(t) for n, t in old.items()}
    for n, t in permute(change, sym, order).items():
        torch.testing.assert_close(moved[n], new[n] + (scale * t).to(t.dtype))
        if P.is_weight(n, t):
            torch.testing.assert_close(plainly[n], new[n] + scale * change[n])
    assert any(not torch.allclose(moved[n], plainly[n], atol=1e-2) for n in moved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_are_rebased_in_the_form_of_the_tuned_one(dtype, tmp_path, capsys):
    sym, _, *networks = bases(normed, 0.0)
    paths = [write(tmp_path / f"{k}.safetensors", w, dtype, "net." * (k == 0))
             for k, w in enumerate(networks)]  # fmt: skip
    out = tmp_path / "out.safetensors"
    line = [paths[0], "--old", paths[1], "--new", paths[2], *NORMED]
    main(["rebase", *map(str, line), "--out", str(out), "--json"])
    assert json.loads(capsys.readouterr().out)["out"] == str(out)
    written = {n.removeprefix("net."): t for n, t in load_file(out).items()}
    stored = (
        {n: t.to(dtype) if t.is_floating_point() else t for n, t in w.items()} for w in networks
    )
    for n, t in rebase(*stored, sym).items():
        torch.testing.assert_close(written[n], t)
    a, b = (
        P.apply(normed(), {n: t.float() for n, t in w.items()}, X) for w in (written, networks[0])
    )
    torch.testing.assert_close(a, b, atol=1e-5 if dtype == torch.float32 else 0.1, rtol=0)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["rebase", "x.pt"], "`--old` is missing"),
        (["rebase", "x.pt", "--old", "y.pt"], "`--new` is missing"),
        (["mergeable", "x.pt", "y.pt"], "There is no file or folder x.pt"),
    ],
)
def test_mistakes_are_one_sentence(line, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert message in failure(capsys, *line)


@pytest.mark.bad_input
def test_bad_arguments_are_refused():
    net = plain()
    sym, w = discover(net, X), P.of(net)
    with pytest.raises(ValueError, match="`scale` must be a finite number, got nan"):
        rebase(w, w, w, sym, scale=float("nan"))
    with pytest.raises(
        ValueError, match="`method` must be one of plain, reference, mixing, got 'm'"
    ):
        rebase(w, w, w, sym, method="m")
    with pytest.raises(ValueError, match="`tolerance` must be a finite number, got inf"):
        mergeable(w, w, sym, tolerance=float("inf"))
    with pytest.raises(ValueError, match="`model` and `batches` go together"):
        mergeable(w, w, sym, model=net)

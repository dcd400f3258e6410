"""`lightning-bnn match` and `merge` as a user calls them."""

import json
import os
import re
import shutil
import sys

import disk_networks
import lightning as L
import pytest
import torch
from disk_networks import (
    EXPERTS,
    FACTORED,
    NORMED,
    PLAIN,
    Experts,
    drawn,
    factored,
    known,
    normed,
    orders,
    plain,
    write,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from shell import failure

from lightning_bnn import models
from lightning_bnn.bank import CheckpointBank
from lightning_bnn.cli import main
from weightsym import mix, permute, random_mixings
from weightsym import params as P
from weightsym.commands.examples import examples_of, loss
from weightsym.matching.repair import reestimated

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(5))
LINEAR = ["--network", "torch.nn.Linear", "--init", '{"in_features": 4, "out_features": 3}']
LINEAR += ["--input", "2,4"]


def outputs(build, state, prefix=""):
    """What a network computes whose weights are in a file, on more numbers than are stored."""
    state = state if isinstance(state, dict) else load_file(state)
    state = {n.removeprefix(prefix): t.double() for n, t in state.items()}
    return P.apply(build().double().eval(), state, X.double())


def distance(a, b):
    a, b = load_file(a), load_file(b)
    return sum(float((a[n].double() - b[n].double()).square().sum()) for n in a) ** 0.5


@pytest.fixture(autouse=True)
def _read_once(monkeypatch):
    without = lambda *args, explain=None, **named: known(*args, **named)  # noqa: E731
    monkeypatch.setattr("weightsym.commands.networks.discover", without)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """One network, its units in other orders: in files, in a bank and in a checkpoint."""
    folder, net = tmp_path_factory.mktemp("written"), drawn(plain)
    write(folder / "a.safetensors", orders(net, 1))
    write(folder / "b.safetensors", P.of(net))
    torch.save({"inputs": X, "targets": net(X).argmax(1)}, folder / "data.pt")
    with CheckpointBank(folder / "bank") as bank:
        for seed in (1, 2):
            bank.append(orders(net, seed))
    (folder / "runs" / "r").mkdir(parents=True)
    state = {f"net.{n}": t for n, t in orders(net, 3).items()}
    content = {"state_dict": state, "epoch": 3, "global_step": 9, "hyper_parameters": {"width": 7}}
    torch.save({**content, "optimizer_states": [1]}, folder / "runs" / "r" / "x.ckpt")
    return folder


@pytest.fixture
def files(written, tmp_path, monkeypatch):
    """A copy of that folder, in which commands are called."""
    monkeypatch.chdir(shutil.copytree(written, tmp_path / "files"))
    return tmp_path / "files"


# ------------------------------------------------------------ match
def test_a_planted_permutation_is_found(files, capsys):
    networks = ["a.safetensors", "b.safetensors", *PLAIN]
    main(["match", *networks, "--out", "c.safetensors", "--data", "data.pt"])
    out = capsys.readouterr().out
    assert "2 networks of 104 parameters" in out
    assert re.search(r"permutation +7 +1", out)
    before = float(re.search(r"^distance to the average: (\S+) -> 0$", out, re.M)[1])
    assert before == pytest.approx(distance("a.safetensors", "b.safetensors") / 2, rel=1e-4)
    assert re.search(r"^barrier .* on 12 examples of \S+: \S+ -> -?(0|\S+e-\d+)$", out, re.M)
    assert distance("c.safetensors", "b.safetensors") == 0
    with safe_open("c.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "from": "a"}
    there = sorted(os.listdir())
    for command in ("match", "merge"):  # without an output numbers are printed
        main([command, *networks])
        assert re.search(r"^distance.*: \S+ -> (0|\S+e-\d+)$", capsys.readouterr().out, re.M)
    assert sorted(os.listdir()) == there


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_types_stay_and_the_function_too(dtype, tmp_path):
    """Other networks: what is written computes what A computes, only nearer to B."""
    a = write(tmp_path / "a.safetensors", P.of(drawn(plain, 1)), dtype, "net.")
    b = write(tmp_path / "b.safetensors", P.of(drawn(plain, 2)))
    c = tmp_path / "c.safetensors"
    main(["match", a, b, "--out", str(c), *PLAIN])
    before, after = load_file(a), load_file(c)
    assert {t.dtype for t in after.values()} == {dtype}
    for name, tensor in before.items():  # the same bits in another order
        assert torch.equal(tensor.flatten().sort().values, after[name].flatten().sort().values)
    assert not torch.equal(before["net.1.weight"], after["net.1.weight"])
    torch.testing.assert_close(outputs(plain, a, "net."), outputs(plain, c, "net."))


def moved_experts(net):
    sym = known(net, torch.randn(5, 4))
    assert any(group.tensors for group in sym.permutations)
    return permute(P.of(net), sym, [torch.arange(g.units).roll(1) for g in sym.permutations])


def mixed(net, seed=1):
    """The same network with its units in another order and its channels mixed."""
    sym, generator = known(net, torch.randn(2, 4)), torch.Generator().manual_seed(seed)
    return mix(orders(net, seed), sym, random_mixings(sym, generator))


def flipped(net):
    return {n: -t if n != "3.bias" else t for n, t in orders(net, 3).items()}


def tanh():
    return models.mlp(4, [6], 3, torch.nn.Tanh)


TANH = ["--network", "disk_networks.tanh", "--input", "2,4"]
PLANTED = {
    "experts": (Experts, moved_experts, EXPERTS, 0.0),
    "signs": (tanh, flipped, TANH, 1e-6),
    "matrices": (factored, mixed, [*FACTORED, "--method", "mixing"], 1e-3),
}


@pytest.mark.parametrize("name", PLANTED)
def test_other_planted_symmetries_are_found(name, tmp_path, monkeypatch):
    monkeypatch.setattr(disk_networks, "tanh", tanh, raising=False)
    build, move, options, close = PLANTED[name]
    net = drawn(build)
    a = write(tmp_path / "a.safetensors", move(net))
    b = write(tmp_path / "b.safetensors", P.of(net))
    c, m = str(tmp_path / "c.safetensors"), str(tmp_path / "m.safetensors")
    main(["match", a, b, "--out", c, *options])
    main(["merge", b, a, "--out", m, *options])
    assert distance(c, b) <= close < 0.1 < distance(a, b)
    torch.testing.assert_close(outputs(build, m), outputs(build, b), atol=1e-4, rtol=0)
    if name == "matrices":  # the negative control: permutations alone
        for command, out in (("match", c), ("merge", m)):
            main([command, a, b, "--out", out, *FACTORED, "--overwrite", "true"])
        assert distance(c, b) > 0.1
        assert not torch.allclose(outputs(build, m), outputs(build, b), atol=1e-2)


# ------------------------------------------------------------ merge
def test_the_average_is_weighted_by_source(tmp_path, capsys):
    """One layer has no order; two networks of one source share its weight."""
    states = [{"weight": torch.randn(3, 4), "bias": torch.randn(3)} for _ in range(3)]
    half = write(tmp_path / "h.safetensors", states[0], torch.bfloat16)
    one = write(tmp_path / "o.safetensors", states[1])
    with CheckpointBank(tmp_path / "bank") as bank:
        bank.append(states[0])
        bank.append(states[2])

    def merged(out, *args):
        out = str(tmp_path / out)
        main(["merge", *args, "--out", out, *LINEAR, "--overwrite", "true"])
        return torch.load(out) if out.endswith("pt") else load_file(out)

    found = merged("x.safetensors", half, one, "--weights", "3", "1")
    assert "weighted 0.75, 0.25" in capsys.readouterr().out
    for name, tensor in found.items():
        exact = 0.75 * states[0][name].bfloat16().double() + 0.25 * states[1][name].double()
        assert tensor.dtype == torch.bfloat16
        torch.testing.assert_close(tensor.double(), exact, atol=0, rtol=2**-8)
    places = str(tmp_path / "bank"), one
    first, other, last = (state["weight"] for state in states)
    found = merged("x.pt", *places, "--weights", "3", "1")["weight"]
    torch.testing.assert_close(found, 0.375 * (first + last) + 0.25 * other)
    found = merged("x.pt", *places, "--last", "1")["weight"]
    torch.testing.assert_close(found, (last + other) / 2)


def test_statistics_of_batch_norms(tmp_path, capsys):
    nets = [drawn(normed, k) for k in range(2)]
    names = [write(tmp_path / f"{k}.safetensors", P.of(n)) for k, n in enumerate(nets)]
    out, data = str(tmp_path / "out.safetensors"), str(tmp_path / "data.safetensors")
    save_file({"inputs": X, "targets": torch.zeros(12, 3)}, data)
    main(["merge", *names, "--out", out, *NORMED])
    assert "statistics of batch norms are averaged" in capsys.readouterr().out
    averaged = load_file(out)
    main(["merge", *names, "--out", out, *NORMED, "--data", data, "--overwrite", "true"])
    assert "statistics of batch norms" not in capsys.readouterr().out
    new = load_file(out)
    hidden = X @ new["0.weight"].T + new["0.bias"]
    torch.testing.assert_close(new["1.running_mean"], hidden.mean(0))
    torch.testing.assert_close(new["1.running_var"], hidden.var(0))
    assert not torch.allclose(averaged["1.running_mean"], new["1.running_mean"])
    assert torch.equal(averaged["0.weight"], new["0.weight"])
    state = P.of(nets[0])
    kept = {n: t.clone() for n, t in state.items()}
    reestimated(normed().eval(), state, [X])
    assert all(torch.equal(t, kept[n]) for n, t in state.items())


def test_copies_from_everywhere_average_to_one(files, capsys):
    """Of members of a checkpoint all count; names and types are those of `--like`."""
    members = P.stack([orders(drawn(plain), seed) for seed in (4, 5, 6)])
    torch.save({"state_dict": {f"state.networks.{n}": t for n, t in members.items()}}, "ours.ckpt")
    write(files / "like.safetensors", P.of(drawn(plain)), torch.bfloat16, "model.")
    places = ["bank", "runs", "a.safetensors", "ours.ckpt"]
    main(["merge", *places, "--out", "m.safetensors", *PLAIN, "--weights", "1", "2", "3", "1"])
    assert "7 networks of" in capsys.readouterr().out
    expected = outputs(plain, "b.safetensors")
    main(["merge", "ours.ckpt", "bank", "--out", "b.safetensors", *PLAIN, "--overwrite", "true"])
    for name in ("m.safetensors", "b.safetensors"):
        torch.testing.assert_close(outputs(plain, name), expected, atol=1e-6, rtol=0)
    main(["merge", *places, "--out", "m.pt", "--like", "like.safetensors", *PLAIN])
    found = torch.load("m.pt")
    assert {t.dtype for t in found.values()} == {torch.bfloat16}
    torch.testing.assert_close(outputs(plain, found, "model."), expected, atol=0.05, rtol=0)
    main(["merge", *places, "--out", "n.safetensors", *PLAIN, "--method", "plain"])
    assert not torch.allclose(outputs(plain, "n.safetensors"), expected, atol=1e-2)


def test_a_checkpoint_that_the_module_loads(files):
    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = plain()

    main(["merge", "runs/r/x.ckpt", "bank", "--out", "out.ckpt", *PLAIN])
    content, module = torch.load("out.ckpt"), Module().double()
    assert content["hyper_parameters"] == {"width": 7}
    assert "optimizer_states" not in content
    module.load_state_dict(content["state_dict"], strict=True)
    expected = outputs(plain, "b.safetensors")
    torch.testing.assert_close(module.net(X.double()), expected, atol=1e-6, rtol=0)


# ------------------------------------------------------------ folders
def hugging_face(folder, state):
    folder.mkdir()
    names = list(state)
    table = {n: f"model-{1 + (k > 2)}.safetensors" for k, n in enumerate(names)}
    for shard in set(table.values()):
        save_file({n: state[n].clone() for n in names if table[n] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    (folder / "config.json").write_text('{"architectures": ["Nothing"]}')
    (folder / "vocab.txt").write_text(folder.name)
    return str(folder)


def test_folders_of_shards(tmp_path, capsys, monkeypatch):
    net = drawn(plain)
    a, b = hugging_face(tmp_path / "a", orders(net, 1)), hugging_face(tmp_path / "b", P.of(net))
    for command, pair, wanted in (("match", (a, b), b), ("merge", (a, b), a)):
        out = tmp_path / command
        main([command, *pair, "--out", str(out), *PLAIN])
        assert sorted(os.listdir(out)) == sorted(os.listdir(a))
        assert (out / "vocab.txt").read_text() == "a"
        for shard in ("model-1.safetensors", "model-2.safetensors"):
            torch.testing.assert_close(load_file(out / shard), load_file(f"{wanted}/{shard}"))
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "install transformers, or specify the class" in failure(capsys, "match", a, b)


def test_models_of_transformers(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 11, "n_positions": 16}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "b")
    shutil.copytree(tmp_path / "b", tmp_path / "a")
    state = load_file(tmp_path / "b" / "model.safetensors")
    order = torch.randperm(32)
    fc, proj = "transformer.h.0.mlp.c_fc", "transformer.h.0.mlp.c_proj.weight"
    moved = {f"{fc}.weight": state[f"{fc}.weight"][:, order], proj: state[proj][order]}
    moved[f"{fc}.bias"] = state[f"{fc}.bias"][order]
    write(tmp_path / "a" / "model.safetensors", state | moved)
    main(["match", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "c")])
    assert distance(tmp_path / "c/model.safetensors", tmp_path / "b/model.safetensors") == 0
    capsys.readouterr()
    main(["diff", str(tmp_path / "a"), str(tmp_path / "b")])
    assert "verdict: the same function" in capsys.readouterr().out
    main(["symmetries", str(tmp_path / "a")])
    found = capsys.readouterr().out
    assert f"weights from {tmp_path / 'a'}\n" in found
    (tmp_path / "a" / "model.safetensors").unlink()
    main(["symmetries", str(tmp_path / "a")])  # which needs no weights
    table = re.compile("kind  .*?at random weights", re.S)
    assert table.search(capsys.readouterr().out)[0] == table.search(found)[0]
    shutil.copyfile(tmp_path / "b/model.safetensors", tmp_path / "a/model.safetensors")
    for name in "ab":
        (tmp_path / name / "config.json").write_text('{"architectures": ["os"]}')
    two = [tmp_path / "a", tmp_path / "b"]
    assert "not a network of transformers" in failure(capsys, "match", *two)


# ------------------------------------------------------------ mistakes
TWO = ["a.safetensors", "b.safetensors"]
OUT = [*TWO, "--out", "c.safetensors"]
BANK = ["merge", "bank", *PLAIN, "--out"]
WEIGHTS = (["1"], ["1", "-1"], ["0", "0"], ["nan", "1"], ["inf", "1"])
REFUSED = [
    (["match", *OUT], "`--network` is missing"),
    (["match", "no.pt", "b.safetensors", *PLAIN], "There is no file or folder no.pt"),
    (["match", *TWO, "--out", "b.safetensors", "--overwrite", "true", *PLAIN],
     "is one of the input networks"),
    (["merge", *OUT[:1], *OUT[2:], *PLAIN], "must hold at least two networks, got 1"),
    *((["merge", *OUT, *PLAIN, "--weights", *w], "weights` must be") for w in WEIGHTS),
    (["match", *TWO, "--out", "there.safetensors", *PLAIN], "`--overwrite true` replaces it"),
    (["match", *OUT, *PLAIN, "--methods", "mixing"], "did you mean `--method`"),
    (["merge", *OUT[2:], *PLAIN], "`sources`"),
    ([*BANK, "x.bin"], "must end in .safetensors, .pt or .ckpt"),
    ([*BANK, "x.pt", "--weights", "1", "2"], "`--weights` must be 1 non-negative numbers"),
    ([*BANK, "x.ckpt"], "`--out` can end in .ckpt only if"),
    ([*BANK, "x.pt", "--like", "y.ckpt"], "There is no file or folder y.ckpt"),
    ([*BANK, "x.pt", "--like", "bank"], "`--like` must be a file or folder with one"),
    ([*BANK, "nowhere/x.pt"], "there is no folder nowhere"),
    ([*BANK, "x.pt", "--last", "0"], "`last` must be at least 1"),
    (["merge", *TWO[:1], "nan.safetensors", *PLAIN], "nan.safetensors: '1.weight' holds NaN"),
    (["merge", "0.safetensors", "1.safetensors", "--out", "x.pt", "--network",
      "disk_networks.Counted", "--input", "2,4"], "has other whole numbers in"),
]  # fmt: skip


class Counted(torch.nn.Linear):
    """A layer with whole numbers."""

    def __init__(self):
        super().__init__(4, 3)
        self.register_buffer("order", torch.tensor([0, 1]))


@pytest.fixture(scope="module")
def mistaken(written, tmp_path_factory):
    """The same files, and others that cannot be averaged."""
    folder = shutil.copytree(written, tmp_path_factory.mktemp("mistaken") / "files")
    state = load_file(folder / "a.safetensors")
    write(folder / "there.safetensors", state)
    write(folder / "nan.safetensors", {n: t * torch.nan for n, t in state.items() if t.ndim > 0})
    for k in range(2):
        state = {**P.of(Counted()), "order": torch.tensor([k, 1])}
        write(folder / f"{k}.safetensors", state)
    return folder


@pytest.mark.bad_input
@pytest.mark.parametrize(("line", "message"), REFUSED)
def test_mistakes_are_one_sentence(line, message, mistaken, capsys, monkeypatch):
    monkeypatch.setattr(disk_networks, "Counted", Counted, raising=False)
    monkeypatch.chdir(mistaken)
    before = sorted(os.listdir())
    assert message in failure(capsys, *line)
    assert sorted(os.listdir()) == before


@pytest.mark.bad_input
@pytest.mark.parametrize("name", ["a.safetensors", "bank/manifest.jsonl", "runs/r/x.ckpt"])
def test_a_damaged_source_is_named_before_anything_else_is_asked_for(name, files, capsys):
    place = name.split("/")[0]
    content = (files / name).read_bytes()
    (files / name).write_bytes(b"{}\n" + content if place == "bank" else content[:-20])
    for line in (["b.safetensors", place], ["b.safetensors", "b.safetensors", "--like", place]):
        message = failure(capsys, "merge", *line)
        assert "--network" not in message
        assert name in message


@pytest.mark.bad_input
def test_a_prefix_is_for_the_files_that_have_it(files, capsys):
    state = load_file("a.safetensors")
    both = {f"{start}{n}": t.clone() for start in ("net.", "ema.") for n, t in state.items()}
    write(files / "both.safetensors", both)
    base = ["match", "both.safetensors", "b.safetensors", "--out", "c.safetensors", *PLAIN]
    base += ["--others", "copy"]
    assert "choose one by its `prefix`" in failure(capsys, *base)
    assert "it lacks 'nets.1.weight'" in failure(capsys, *base, "--prefix", "nets.")
    main([*base, "--prefix", "net."])
    found = load_file("c.safetensors")
    for name, tensor in load_file("b.safetensors").items():
        torch.testing.assert_close(found[f"net.{name}"], tensor)
        assert torch.equal(found[f"ema.{name}"], both[f"ema.{name}"])


# ------------------------------------------------------------ data
@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"inputs": X}, "must hold `inputs` and `targets`"),
        ({"inputs": X, "targets": torch.zeros(3)}, "must have equal lengths"),
        ({"inputs": X[:0], "targets": X[:0]}, "must have equal lengths"),
        ({"inputs": X, "targets": torch.tensor(1)}, "must have equal lengths"),
        ({"inputs": X * torch.nan, "targets": torch.zeros(12, 3)}, "holds NaN or infinite"),
        ("none.pt", "there is no file"),
        ("none.yaml", "none.yaml"),
        ("nowhere.Data", "cannot be imported"),
        ("torch.nn.Identity", "must be a LightningDataModule"),
        ("lightning.LightningDataModule", "raised"),
    ],
)
def test_data_that_are_none_are_refused(data, message, tmp_path):
    if not isinstance(data, str):
        torch.save(data, tmp_path / "bad.pt")
        data = str(tmp_path / "bad.pt")
    with pytest.raises(ValueError, match=message):
        examples_of(data)


CLASSES = torch.zeros(12, dtype=torch.long)
UNFIT = {
    "wide": {"inputs": torch.ones(12, 7), "targets": CLASSES},
    "whole numbers": {"inputs": X.long(), "targets": CLASSES},
    "labels": {"inputs": X, "targets": CLASSES + 99},
    "targets": {"inputs": X, "targets": torch.zeros(12, 99)},
    "datamodule": None,
}
COMMANDS = {"match": OUT, "merge": OUT, "diff": TWO}


@pytest.mark.bad_input
@pytest.mark.parametrize("command", COMMANDS)
def test_data_must_fit_the_network_and_are_cast_to_its_precision(command, files, capsys):
    line = [command, *COMMANDS[command], *PLAIN, "--data"]
    for kind, content in UNFIT.items():
        data = "d.pt" if content else "lightning_bnn.datamodules.Digits"
        torch.save(content, "d.pt")
        message = failure(capsys, *line, data)
        assert "`--data`: " in message
        assert "fit the network" in message
        assert kind == "targets" or data in message
        assert not os.path.exists("c.safetensors")
    told = []
    for dtype in (torch.float32, torch.float64):
        torch.save({"inputs": X.to(dtype), "targets": CLASSES}, "d.pt")
        main([*line, "d.pt", *([] if command == "diff" else ["--overwrite", "true"])])
        lines = capsys.readouterr().out.splitlines()
        told.append([text for text in lines if text.startswith("barrier")])
    assert told[0] == told[1] != []


@pytest.mark.bad_input
def test_losses_of_classes_tokens_pixels_and_numbers():
    scores, classes = torch.randn(4, 5, 6), torch.randint(0, 5, (4, 6))
    by_pixel = torch.nn.functional.cross_entropy(scores, classes)
    for outputs in (scores, scores.mT, (scores.mT, None)):
        torch.testing.assert_close(loss(outputs, classes), by_pixel)
    assert loss(torch.ones(3, 1), torch.zeros(3)) == 1
    for outputs, targets in ((torch.ones(3, 2), torch.zeros(2, 2)), (scores, classes[:2])):
        with pytest.raises(ValueError, match="the targets do not fit the network"):
            loss(outputs, targets)

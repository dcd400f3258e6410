"""`lightning-bnn match` and `merge` as a user calls them."""

import json
import os
import re
import shutil
import sys

import disk_networks
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

from lightning_bnn.cli import main
from weightsym import mix, permute, random_mixings
from weightsym import params as P
from weightsym.commands.examples import examples_of, loss
from weightsym.matching.repair import reestimated

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(5))


def loaded(build, path, prefix=""):
    net = build().double()  # on more numbers than are stored
    net.load_state_dict({n.removeprefix(prefix): t for n, t in load_file(path).items()})
    return net.eval()


def outputs(build, path, prefix=""):
    return loaded(build, path, prefix)(X.double())


def distance(a, b):
    a, b = load_file(a), load_file(b)
    return sum(float((a[n].double() - b[n].double()).square().sum()) for n in a) ** 0.5


@pytest.fixture(autouse=True)
def _read_once(monkeypatch):
    monkeypatch.setattr("weightsym.commands.merge.discover", known)
    monkeypatch.setattr("weightsym.commands.diff.discover", known)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A network, its copies in two other orders, and examples."""
    folder, net = tmp_path_factory.mktemp("written"), drawn(plain)
    for k in (1, 2):
        write(folder / f"a{k}.safetensors", orders(net, k))
    write(folder / "b.safetensors", P.of(net))
    torch.save({"inputs": X, "targets": net(X).argmax(1)}, folder / "data.pt")
    return folder


@pytest.fixture
def files(written, tmp_path):
    """The same in a folder of its own."""
    return shutil.copytree(written, tmp_path / "files")


# ------------------------------------------------------------ match
def test_a_planted_permutation_is_found(files, capsys):
    a, b, c = (files / f"{name}.safetensors" for name in ("a1", "b", "c"))
    main(["match", str(a), str(b), "--out", str(c), *PLAIN, "--data", str(files / "data.pt")])
    out = capsys.readouterr().out
    assert "2 networks of 104 parameters" in out
    assert re.search(r"permutation +7 +1", out)
    before = float(re.search(r"^distance to the average: (\S+)$", out, re.M)[1])
    assert before == pytest.approx(distance(a, b) / 2, rel=1e-4)
    assert re.search(r"^distance to the average: \S+ -> 0$", out, re.M)
    assert re.search(r"^barrier .* on 12 examples of \S+: \S+ -> -?(0|\S+e-\d+)$", out, re.M)
    assert distance(c, b) == 0 < distance(a, b)
    with safe_open(c, "pt") as file:
        assert file.metadata() == {"format": "pt", "from": "a1"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_types_stay_and_the_function_too(dtype, tmp_path):
    """Other networks: what is written computes what A computes, only nearer to B."""
    a = write(tmp_path / "a.safetensors", P.of(drawn(plain, 1)), dtype, "net.")
    b = write(tmp_path / "b.safetensors", P.of(drawn(plain, 2)))
    c = tmp_path / "c.safetensors"
    main(["match", a, b, "--out", str(c), *PLAIN])
    before, after = load_file(a), load_file(c)
    assert before.keys() == after.keys()
    assert {t.dtype for t in after.values()} == {dtype}
    for name, tensor in before.items():  # the same bits in another order
        assert torch.equal(tensor.flatten().sort().values, after[name].flatten().sort().values)
    assert not torch.equal(before["net.1.weight"], after["net.1.weight"])
    torch.testing.assert_close(outputs(plain, a, "net."), outputs(plain, c, "net."))


def test_experts_change_places_in_files(tmp_path):
    net = drawn(Experts)
    sym, state = known(net, torch.randn(5, 4)), P.of(net)
    order = [torch.arange(g.units).roll(1) for g in sym.permutations]
    a = write(tmp_path / "a.safetensors", permute(state, sym, order))
    b = write(tmp_path / "b.safetensors", state)
    c, m = str(tmp_path / "c.safetensors"), str(tmp_path / "m.safetensors")
    main(["match", a, b, "--out", c, *EXPERTS])
    main(["merge", b, a, "--out", m, *EXPERTS])
    assert any(group.tensors for group in sym.permutations)
    assert distance(c, b) == 0 < distance(a, b)
    assert distance(m, b) == 0


def test_signs_are_flipped_where_they_may_be(tmp_path, monkeypatch):
    from lightning_bnn import models

    net = models.mlp(4, [6], 3, torch.nn.Tanh)
    monkeypatch.setattr(disk_networks, "tanh", lambda: net, raising=False)
    state = P.of(net)
    flipped = {n: -t if n != "3.bias" else t for n, t in orders(net, 3).items()}
    a, b = write(tmp_path / "a.safetensors", flipped), write(tmp_path / "b.safetensors", state)
    network = ["--network", "disk_networks.tanh", "--input", "2,4"]
    c = str(tmp_path / "c.safetensors")
    main(["match", a, b, "--out", c, *network])
    assert distance(c, b) < 1e-6 < distance(a, b)


def test_without_an_output_numbers_are_printed_and_nothing_is_written(files, capsys):
    before = sorted(os.listdir(files))
    networks = [f"{files}/{name}.safetensors" for name in ("a1", "b")]
    for command in ("match", "merge"):
        main([command, *networks, *PLAIN])
        assert re.search(r"^distance.*: \S+ -> (0|\S+e-\d+)$", capsys.readouterr().out, re.M)
    assert sorted(os.listdir(files)) == before


# ------------------------------------------------------------ merge


def test_the_average_is_weighted(tmp_path, capsys):
    """One layer has no order: what is written is what weights say, also of half precision."""
    states = [{"weight": torch.randn(3, 4), "bias": torch.randn(3)} for _ in range(2)]
    names = [
        write(tmp_path / f"{k}.safetensors", s, [torch.bfloat16, torch.float32][k])
        for k, s in enumerate(states)
    ]
    out = str(tmp_path / "out.safetensors")
    linear = ["--network", "torch.nn.Linear", "--init", '{"in_features": 4, "out_features": 3}']
    main(["merge", *names, "--weights", "3", "1", "--out", out, "--input", "2,4", *linear])
    assert "weighted 0.75, 0.25" in capsys.readouterr().out
    for name, tensor in load_file(out).items():
        exact = 0.75 * states[0][name].bfloat16().double() + 0.25 * states[1][name].double()
        assert tensor.dtype == torch.bfloat16
        torch.testing.assert_close(tensor.double(), exact, atol=0, rtol=2**-8)


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


def test_folders_of_shards(tmp_path):
    net = drawn(plain)
    a, b = hugging_face(tmp_path / "a", orders(net, 1)), hugging_face(tmp_path / "b", P.of(net))
    main(["match", a, b, "--out", str(tmp_path / "c"), *PLAIN])
    assert sorted(os.listdir(tmp_path / "c")) == sorted(os.listdir(a))
    assert (tmp_path / "c" / "vocab.txt").read_text() == "a"
    for shard in ("model-1.safetensors", "model-2.safetensors"):
        got, wanted = load_file(tmp_path / "c" / shard), load_file(tmp_path / "b" / shard)
        assert all(torch.equal(got[n], t) for n, t in wanted.items())
    main(["merge", a, b, "--out", str(tmp_path / "m"), *PLAIN])
    merged = load_file(tmp_path / "m" / "model-2.safetensors")
    for name, tensor in load_file(tmp_path / "a" / "model-2.safetensors").items():
        torch.testing.assert_close(merged[name], tensor)


def test_a_folder_without_transformers_is_one_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    a = hugging_face(tmp_path / "a", P.of(plain()))
    assert "install transformers, or name the class" in failure(capsys, "match", a, a)


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
    save_file({n: t.contiguous() for n, t in (state | moved).items()},
              tmp_path / "a" / "model.safetensors", {"format": "pt"})  # fmt: skip
    main(["match", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "c")])
    assert distance(tmp_path / "c/model.safetensors", tmp_path / "b/model.safetensors") == 0
    for name in "ab":
        (tmp_path / name / "config.json").write_text('{"architectures": ["os"]}')
    capsys.readouterr()
    two = [tmp_path / "a", tmp_path / "b"]
    assert "no network of transformers" in failure(capsys, "match", *two)


# ------------------------------------------------------------ mistakes
@pytest.mark.bad_input
def test_mistakes_are_one_sentence(files, capsys):
    a, b, out = files / "a1.safetensors", files / "b.safetensors", files / "c.safetensors"
    two = [a, b, "--out", out]
    assert "`--network` is missing" in failure(capsys, "match", *two)
    assert "no file or folder" in failure(capsys, "match", files / "no.pt", b, *PLAIN)
    same = [a, b, "--out", b, "--overwrite", "true"]
    assert "is one of the networks that are read" in failure(capsys, "match", *same, *PLAIN)
    assert "must hold at least two networks, got 1" in failure(
        capsys, "merge", a, "--out", out, *PLAIN
    )
    for weights in (["1"], ["1", "-1"], ["0", "0"], ["nan", "1"], ["inf", "1"]):
        message = failure(capsys, "merge", *two, "--weights", *weights, *PLAIN)
        assert "weights` must be" in message
    write(out, load_file(a))
    assert "`--overwrite true` replaces it" in failure(capsys, "match", *two, *PLAIN)
    assert "did you mean `--method`" in failure(capsys, "match", *two, "--methods", "mixing")
    assert "`sources`" in failure(capsys, "merge", "--out", out, *PLAIN)


def mixed(net, seed):
    """The same network with its units in another order and its channels mixed."""
    sym, generator = known(net, torch.randn(2, 4)), torch.Generator().manual_seed(seed)
    return mix(orders(net, seed), sym, random_mixings(sym, generator))


def test_planted_matrices_are_found_and_written(tmp_path):
    net = drawn(factored)
    a, b = (
        write(tmp_path / f"{n}.safetensors", w) for n, w in (("a", mixed(net, 1)), ("b", P.of(net)))
    )
    c = str(tmp_path / "c.safetensors")
    base = ["match", a, b, "--out", c, *FACTORED]
    main([*base, "--method", "mixing"])
    assert distance(c, b) < 1e-3 < 0.1 < distance(a, b)
    torch.testing.assert_close(outputs(factored, c), outputs(factored, a), atol=1e-5, rtol=0)
    main([*base, "--overwrite", "true"])
    assert distance(c, b) > 0.1  # permutations alone


def test_networks_are_merged_by_matrices(tmp_path):
    net = drawn(factored)
    names = [write(tmp_path / f"{k}.safetensors", mixed(net, k)) for k in range(3)]
    out = str(tmp_path / "out.safetensors")
    main(["merge", *names, "--out", out, *FACTORED, "--method", "mixing"])
    expected = outputs(factored, names[0])
    torch.testing.assert_close(outputs(factored, out), expected, atol=1e-4, rtol=0)
    main(["merge", *names, "--out", out, *FACTORED, "--overwrite", "true"])
    assert not torch.allclose(outputs(factored, out), expected, atol=1e-2)


@pytest.mark.bad_input
def test_a_prefix_is_for_the_files_that_have_it(written, tmp_path, capsys):
    state, b = load_file(written / "a1.safetensors"), str(written / "b.safetensors")
    both = {f"{start}{n}": t.clone() for start in ("net.", "ema.") for n, t in state.items()}
    a, c = write(tmp_path / "a.safetensors", both), str(tmp_path / "c.safetensors")
    base = ["match", a, b, "--out", c, *PLAIN, "--others", "copy"]
    assert "choose one by its `prefix`" in failure(capsys, *base)
    assert "it lacks 'nets.1.weight'" in failure(capsys, *base, "--prefix", "nets.")
    main([*base, "--prefix", "net."])
    found = load_file(c)
    for name, tensor in load_file(b).items():
        torch.testing.assert_close(found[f"net.{name}"], tensor)
        assert torch.equal(found[f"ema.{name}"], both[f"ema.{name}"])


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"inputs": X}, "must hold `inputs` and `targets`"),
        ({"inputs": X, "targets": torch.zeros(3)}, "must be as many"),
        ({"inputs": X[:0], "targets": X[:0]}, "must be as many"),
        ({"inputs": X, "targets": torch.tensor(1)}, "must be as many"),
        ({"inputs": X * torch.nan, "targets": torch.zeros(12, 3)}, "holds NaN or infinite"),
    ],
)
def test_data_in_files_are_checked(content, message, tmp_path):
    torch.save(content, tmp_path / "bad.pt")
    with pytest.raises(ValueError, match=message):
        examples_of(str(tmp_path / "bad.pt"))


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("none.pt", "there is no file"),
        ("none.yaml", "none.yaml"),
        ("nowhere.Data", "cannot be imported"),
        ("torch.nn.Identity", "must be a LightningDataModule"),
        ("lightning.LightningDataModule", "raised"),
    ],
)
def test_data_that_are_none_are_refused(data, message):
    with pytest.raises(ValueError, match=message):
        examples_of(data)


COMMANDS = ("match", "merge", "diff")
UNFIT = {
    "wide": {"inputs": torch.ones(12, 7), "targets": torch.zeros(12, dtype=torch.long)},
    "whole numbers": {"inputs": X.long(), "targets": torch.zeros(12, dtype=torch.long)},
    "labels": {"inputs": X, "targets": torch.full((12,), 99)},
    "targets": {"inputs": X, "targets": torch.zeros(12, 99)},
}


def judged(command, written, data, out):
    two = [str(written / "a1.safetensors"), str(written / "b.safetensors")]
    target = [] if command == "diff" else ["--out", str(out)]
    return [command, *two, *target, *PLAIN, "--data", str(data)]


@pytest.mark.bad_input
@pytest.mark.parametrize("kind", [*UNFIT, "datamodule"])
@pytest.mark.parametrize("command", COMMANDS)
def test_data_that_do_not_fit_the_network_are_one_sentence(
    command, kind, written, tmp_path, capsys
):
    data = tmp_path / "data.pt"
    if kind in UNFIT:
        torch.save(UNFIT[kind], data)
    else:
        data = "lightning_bnn.datamodules.Digits"
    message = failure(capsys, *judged(command, written, data, tmp_path / "out.safetensors"))
    assert "`--data`: " in message
    assert "fit the network" in message
    assert kind == "targets" or str(data) in message
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_inputs_are_cast_to_the_precision_of_the_network(command, written, tmp_path, capsys):
    told = []
    for k, dtype in enumerate((torch.float32, torch.float64)):
        torch.save(
            {"inputs": X.to(dtype), "targets": torch.zeros(12, dtype=torch.long)}, tmp_path / "d.pt"
        )
        main(judged(command, written, tmp_path / "d.pt", tmp_path / f"{k}.safetensors"))
        lines = capsys.readouterr().out.splitlines()
        told.append([line for line in lines if line.startswith("barrier")])
    assert told[0] == told[1] != []


def test_data_of_a_datamodule():
    examples = examples_of("lightning_bnn.datamodules.Digits")
    assert examples.batches[0][0].shape[1:] == (1, 8, 8)
    assert str(examples).endswith("examples of lightning_bnn.datamodules.Digits")


@pytest.mark.bad_input
def test_losses_of_classes_tokens_pixels_and_numbers(files, capsys):
    scores, classes = torch.randn(4, 5, 6), torch.randint(0, 5, (4, 6))
    by_pixel = torch.nn.functional.cross_entropy(scores, classes)
    torch.testing.assert_close(loss(scores, classes), by_pixel)
    torch.testing.assert_close(loss(scores.mT, classes), by_pixel)
    torch.testing.assert_close(loss((scores.mT, None), classes), by_pixel)
    assert loss(torch.ones(3, 1), torch.zeros(3)) == 1
    for outputs, targets in ((torch.ones(3, 2), torch.zeros(2, 2)), (scores, classes[:2])):
        with pytest.raises(ValueError, match="the targets do not fit the network"):
            loss(outputs, targets)
    torch.save({"inputs": X, "targets": torch.zeros(12, 2)}, files / "bad.pt")
    two = [files / "a1.safetensors", files / "b.safetensors", *PLAIN]
    message = failure(capsys, "match", *two, "--data", files / "bad.pt")
    assert "the targets do not fit the network" in message


@pytest.mark.bad_input
def test_whole_numbers_have_no_average(tmp_path, capsys, monkeypatch):
    class Counted(torch.nn.Linear):
        def __init__(self):
            super().__init__(4, 3)
            self.register_buffer("order", torch.tensor([0, 1]))

    monkeypatch.setattr(disk_networks, "counted", Counted, raising=False)
    names = [
        write(tmp_path / f"{k}.safetensors", {**P.of(Counted()), "order": torch.tensor([k, 1])})
        for k in range(2)
    ]
    message = failure(capsys, "merge", *names, "--out", tmp_path / "out.safetensors", "--network",
                      "disk_networks.counted", "--input", "2,4")  # fmt: skip
    assert "holds other whole numbers than the first" in message
    assert sorted(os.listdir(tmp_path)) == ["0.safetensors", "1.safetensors"]

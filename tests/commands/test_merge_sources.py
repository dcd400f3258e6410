"""`lightning-bnn merge` with networks from banks, runs and checkpoints."""

import lightning as L
import pytest
import torch
from disk_networks import PLAIN, drawn, orders, plain, write
from safetensors.torch import load_file
from shell import failure

from lightning_bnn.bank import CheckpointBank
from lightning_bnn.cli import main
from weightsym import params as P

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))


def outputs(build, state):
    return P.apply(build().eval(), state, X)


@pytest.fixture
def sources(tmp_path):
    """One network, its units in other orders, in a bank, a folder of checkpoints and a file."""
    net = drawn(plain)
    with CheckpointBank(tmp_path / "bank") as bank:
        for seed in (1, 2):
            bank.append(orders(net, seed))
    (tmp_path / "runs" / "a").mkdir(parents=True)
    state = {f"net.{n}": t for n, t in orders(net, 3).items()}
    content = {"state_dict": state, "epoch": 3, "global_step": 9, "hyper_parameters": {"width": 7}}
    torch.save({**content, "optimizer_states": [1]}, tmp_path / "runs" / "a" / "x.ckpt")
    write(tmp_path / "one.safetensors", P.of(net))
    return tmp_path, P.of(net)


def test_copies_from_everywhere_average_to_one(sources, capsys):
    folder, net = sources
    names = [str(folder / n) for n in ("bank", "runs", "one.safetensors")]
    out = str(folder / "out.safetensors")
    main(["merge", *names, "--out", out, *PLAIN, "--weights", "1", "2", "3"])
    assert "4 networks of" in capsys.readouterr().out
    expected = outputs(plain, net)
    torch.testing.assert_close(outputs(plain, load_file(out)), expected, atol=1e-6, rtol=0)
    main(["merge", *names, "--out", out, *PLAIN, "--method", "plain", "--overwrite", "true"])
    assert not torch.allclose(outputs(plain, load_file(out)), expected, atol=1e-2)


def test_weights_are_those_of_sources(tmp_path):
    """Two networks of one source share its weight; a linear layer has no frame."""
    states = [{"weight": torch.full((3, 4), float(k)), "bias": torch.zeros(3)} for k in range(3)]
    with CheckpointBank(tmp_path / "bank") as bank:
        for state in states[:2]:
            bank.append(state)
    one = write(tmp_path / "one.safetensors", states[2])
    linear = ["--network", "torch.nn.Linear", "--init", '{"in_features": 4, "out_features": 3}']
    out = str(tmp_path / "out.pt")
    base = ["merge", str(tmp_path / "bank"), one, "--out", out, *linear, "--input", "2,4"]
    main([*base, "--weights", "3", "1"])
    assert float(torch.load(out)["weight"].mean()) == pytest.approx(0.75 * 0.5 + 0.25 * 2)
    main([*base, "--last", "1", "--overwrite", "true"])
    assert float(torch.load(out)["weight"].mean()) == pytest.approx(1.5)


def test_a_checkpoint_that_the_module_loads(sources):
    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = plain()

    folder, net = sources
    run, out = str(folder / "runs" / "a" / "x.ckpt"), str(folder / "out.ckpt")
    main(["merge", run, str(folder / "bank"), "--out", out, *PLAIN])
    content = torch.load(out)
    assert content["hyper_parameters"] == {"width": 7}
    assert "optimizer_states" not in content
    module = Module()
    module.load_state_dict(content["state_dict"], strict=True)
    torch.testing.assert_close(module.net(X), outputs(plain, net), atol=1e-6, rtol=0)


def test_members_of_a_checkpoint_and_the_form_of_another_file(sources):
    """All members of a module of this package count; names and types are those of `--like`."""
    folder, net = sources
    members = [orders(drawn(plain), seed) for seed in (4, 5, 6)]
    state = {f"networks.{n}": t for n, t in P.stack(members).items()}
    torch.save({"state_dict": state, "epoch": 1}, folder / "ours.ckpt")
    like = write(folder / "like.safetensors", net, torch.bfloat16, "model.")
    outs = [str(folder / f"out.{end}") for end in ("safetensors", "pt")]
    names = [str(folder / "ours.ckpt"), str(folder / "bank")]
    main(["merge", *names, "--out", outs[0], *PLAIN])
    torch.testing.assert_close(
        outputs(plain, load_file(outs[0])), outputs(plain, net), atol=1e-6, rtol=0
    )
    main(["merge", *names, "--out", outs[1], "--like", like, *PLAIN])
    found = torch.load(outs[1])
    assert {t.dtype for t in found.values()} == {torch.bfloat16}
    plainly = {n.removeprefix("model."): t.float() for n, t in found.items()}
    torch.testing.assert_close(outputs(plain, plainly), outputs(plain, net), atol=0.05, rtol=0)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--out", "x.bin"], "must end in .safetensors, .pt or .ckpt"),
        (["--out", "x.pt", "--weights", "1", "2"], "`--weights` must be 1 numbers"),
        (["--out", "x.pt", "--weights", "-1"], "not negative"),
        (["--out", "x.ckpt"], "`--like` is missing"),
        (["--out", "x.pt", "--like", "y.ckpt"], "There is no file or folder y.ckpt"),
        (["--out", "x.pt", "--like", "bank"], "`--like` must be a file or folder with one"),
        (["--out", "nowhere/x.pt"], "there is no folder nowhere"),
        (["--out", "x.pt", "--last", "0"], "`last` must be at least 1"),
    ],
)
def test_errors(sources, args, message, capsys, monkeypatch):
    folder, _ = sources
    monkeypatch.chdir(folder)
    assert message in failure(capsys, "merge", "bank", *args, *PLAIN)


def cut(path):
    path.write_bytes(path.read_bytes()[:-20])


@pytest.mark.bad_input
@pytest.mark.parametrize("name", ["one.safetensors", "bank", "runs", "runs/a/x.ckpt"])
def test_a_damaged_source_is_named_before_anything_else_is_asked_for(name, sources, capsys):
    folder, net = sources
    damaged = {"bank": "bank/manifest.jsonl", "runs": "runs/a/x.ckpt"}.get(name, name)
    if name == "bank":
        (folder / damaged).write_bytes(b"{}\n" + (folder / damaged).read_bytes())
    else:
        cut(folder / damaged)
    whole = write(folder / "whole.safetensors", net)
    for line in (["merge", whole, str(folder / name)], ["merge", whole, whole, "--like"]):
        message = failure(capsys, *line, *([folder / name] if line[-1] == "--like" else []))
        assert "--network" not in message
        assert str(folder / damaged) in message


def test_what_is_not_finite_is_named(sources, capsys):
    folder, net = sources
    bad = {n: t.clone() for n, t in net.items()}
    bad["1.weight"][0, 0] = torch.nan
    name = write(folder / "bad.safetensors", bad)
    line = ["merge", folder / "bank", name, "--out", folder / "x.pt", *PLAIN]
    assert "bad.safetensors: '1.weight' holds NaN" in failure(capsys, *line)

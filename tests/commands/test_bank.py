"""`lightning-bnn bank` as a user calls it."""

import torch
from shell import failure

from lightning_bnn import models
from lightning_bnn.cli import main
from weightsym import params as P


def test_add_show_export(tmp_path, capsys):
    for k in range(3):
        state = {f"net.{n}": t for n, t in P.of(models.mlp(4, [3], 2)).items()}
        torch.save({"state_dict": state, "epoch": k, "global_step": 10 * k}, tmp_path / f"{k}.ckpt")
    store = str(tmp_path / "bank")
    main(["bank", store, "--add", str(tmp_path), "--prefix", "net."])
    out = capsys.readouterr().out
    assert "added 3 networks" in out
    assert "3 networks of 23 weights" in out
    lines = [line.split() for line in out.splitlines()]
    assert ["1.weight", "3", "x", "4", "12"] in lines
    (header,) = (line for line in lines if line[:1] == ["network"])
    assert dict(zip(header, lines[-1], strict=True))["step"] == "20"
    assert lines[-1][0] == "2"  # the last of three
    main(["bank", store, "--verify", "true", "--export", str(tmp_path / "out")])
    out = capsys.readouterr().out
    assert "all files are as they were written" in out
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 3


def test_mistakes(tmp_path, capsys):
    assert "There is no bank at" in failure(capsys, "bank", tmp_path / "none")

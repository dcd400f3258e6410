"""Files that would run code if they were unpickled: no command and no function runs it."""

import contextlib
import os
import pickle
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from lightning.pytorch.core import saving
from module_cases import Blobs, network, trainer
from shell import script_of
from small_runs import NET, bank, config

from lightning_bnn.bank import CheckpointBank, import_files
from lightning_bnn.bank.shipped import bank_card, shipped_path
from lightning_bnn.cli import main
from lightning_bnn.doctor.findings import Report
from lightning_bnn.modules import DeepEnsemble, FromCheckpoints
from lightning_bnn.references.cards import Card
from weightsym.networks.files.loading import load, read_json
from weightsym.networks.files.safetensors_format import save_tensors
from weightsym.networks.files.settings import settings_of_text

pytestmark = pytest.mark.filterwarnings("ignore")


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def called(line):
    script_of(line[0])(line)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with networks that are fine, a configuration, and files that are not."""
    monkeypatch.chdir(tmp_path)
    config(tmp_path)
    bank("fine", 6)
    state = {f"state.networks.{n}": t[None] for n, t in NET.state_dict().items()}
    for folder in ("bad", "bad_pt"):
        (tmp_path / folder).mkdir()
    bad = {
        "state_dict": state,
        "hyper_parameters": Touch("run"),
        "lightning_bnn": {"class": "SWAG"},
    }
    torch.save(bad, "bad/it.ckpt")
    torch.save({**NET.state_dict(), "more": Touch("run")}, "bad_pt/it.pt")
    Path("old.ckpt").write_bytes(pickle.dumps(Touch("run"), protocol=2))
    return tmp_path


def test_such_a_file_would_have_run(here):
    """The negative control."""
    torch.load("bad/it.ckpt", weights_only=False)
    assert Path("run").is_dir()


FIT = ["-c", "like.yaml", "--trainer.accelerator", "cpu", "--trainer.fast_dev_run", "1"]
BANK_OF = ["fine", "--data", "like.yaml", "--posteriors.A"]
COMMANDS = {
    "compare": ["compare", *BANK_OF, "bad/it.ckpt"],
    "compare, a folder": ["compare", *BANK_OF, "bad_pt"],
    "compare, the reference": [
        "compare", "bad/it.ckpt", "--data", "like.yaml", "--posteriors.A", "fine",
    ],
    **{
        name: [name, "--networks", "bad/it.ckpt", "--data", "like.yaml", "--out", "out"]
        for name in ("mass", "collapse", "marginals")
    },
    "symmetries": [
        "symmetries", "lightning_bnn.models.optunet", "--input", "1,1,28,28",
        "--checkpoint", "bad_pt/it.pt",
    ],
    "diff": [
        "diff", "bad/it.ckpt", "bad_pt/it.pt", "--network", "lightning_bnn.models.optunet",
        "--input", "1,1,28,28",
    ],
    "bank": ["bank", "new", "--add", "bad"],
    **{name: [name, *FIT, "--ckpt_path", "bad/it.ckpt"] for name in ("fit", "test", "predict")},
    "start_from": ["fit", *FIT, "--model.init_args.start_from", "bad/it.ckpt"],
}  # fmt: skip


@pytest.mark.bad_input
@pytest.mark.parametrize("name", COMMANDS)
def test_commands_run_nothing(name, here, capsys):
    with pytest.raises(SystemExit) as end:
        called(COMMANDS[name])
    assert not Path("run").exists()
    assert end.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.fixture
def address(here, monkeypatch):
    """Where a server of this machine gives out the bad checkpoint."""
    monkeypatch.setenv("TORCH_HOME", str(here / "cache"))
    handler = partial(SimpleHTTPRequestHandler, directory=here / "bad")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/it.ckpt"
        server.shutdown()


@pytest.mark.bad_input
@pytest.mark.parametrize("name", ["fit", "test"])
def test_nothing_runs_that_comes_from_a_url(name, address, capfd):
    """Lightning's own default there is to execute what it is given."""
    with pytest.raises(SystemExit):
        main([name, *FIT, "--ckpt_path", address])
    assert not Path("run").exists()
    assert "runs what is in it" in capfd.readouterr().err
    with contextlib.suppress(Exception):
        DeepEnsemble.load_from_checkpoint(address, network=NET)
    assert Path("run").is_dir()  # the negative control


FUNCTIONS = {
    "load": lambda: load("bad/it.ckpt"),
    "load, as torch once wrote": lambda: load("old.ckpt"),
    "import_files": lambda: import_files(CheckpointBank("new"), "bad"),
    "start_from": lambda: DeepEnsemble(NET, start_from="bad/it.ckpt"),
    "start_from, a folder": lambda: DeepEnsemble(NET, start_from="bad_pt"),
    "load_from_checkpoint": lambda: DeepEnsemble.load_from_checkpoint("bad/it.ckpt", network=NET),
    "FromCheckpoints": lambda: FromCheckpoints(NET, "bad"),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_run_nothing(name, here):
    with pytest.raises(ValueError, match="only tensors and plain data are"):
        FUNCTIONS[name]()
    assert not Path("run").exists()


@pytest.fixture(scope="module")
def own():
    """A checkpoint of a module of ours."""
    module, run = DeepEnsemble(network()), trainer(max_epochs=1)
    run.fit(module, Blobs())
    return run._checkpoint_connector.dump_checkpoint()


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [
        ("mass", {"_class_path": "run", "_instantiator": "os.link"}, "requests a call of os.link"),
        ("doctor", {"_instantiator": "os.link"}, "requests a call of os.link"),
        ("mass", {"_instantiator": ["os.link"]}, "requests a call of ['os.link']"),
        ("doctor", [1], "has hyper-parameters of type list"),
    ],
)
def test_a_checkpoint_may_not_name_the_function_that_makes_its_module(
    command, arguments, words, own, here, monkeypatch, capsys
):
    monkeypatch.setattr(saving, "_ALLOWED_INSTANTIATORS", {"os.link"}, raising=False)
    known = own["hyper_parameters"]
    given = {**known, **arguments} if isinstance(arguments, dict) else arguments
    torch.save({**own, "hyper_parameters": given}, "bad/it.ckpt")
    options = [*(["--networks"] if command == "mass" else []), "bad/it.ckpt", "--data", "like.yaml"]
    with pytest.raises(SystemExit):
        called([command, *options])
    assert words in capsys.readouterr().err


# ------------------------------------------------------------ headers, depths, sizes
def safetensors(path, header):
    Path(path).write_bytes(len(header).to_bytes(8, "little") + header)


HEADERS = {
    "huge": b'{"1.weight":{"dtype":"F32","shape":[0,18446744073709551615],"data_offsets":[0,0]}}',
    "negative": b'{"1.weight":{"dtype":"F32","shape":[-1,4],"data_offsets":[0,0]}}',
    "deep": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
}
READERS = {
    "symmetries": [
        "symmetries", "lightning_bnn.models.optunet", "--input", "1,1,28,28", "--checkpoint",
    ],
    "mass": ["mass", "--data", "like.yaml", "--out", "out", "--networks"],
    "compare": ["compare", "--data", "like.yaml", "--posteriors.A", "fine"],
    "doctor": ["doctor", "--data", "like.yaml"],
    "bank": ["bank", "new", "--add"],
    "diff": ["diff", "fine.safetensors"],
    "match": ["match", "fine.safetensors"],
    "merge": ["merge", "fine.safetensors"],
}  # fmt: skip


@pytest.mark.bad_input
@pytest.mark.parametrize("header", HEADERS)
def test_every_command_refuses_a_bad_header_in_one_sentence(header, here, capsys):
    safetensors("it.safetensors", HEADERS[header])
    save_tensors(Path("fine.safetensors"), NET.state_dict())
    for name, arguments in READERS.items():
        with pytest.raises(SystemExit) as end:
            called([*arguments, "it.safetensors"])
        said = capsys.readouterr().err.strip().splitlines()
        assert end.value.code == 2, name
        assert len(said) == 1, name
        assert "it.safetensors is " in said[0], name


@pytest.mark.bad_input
@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_names_cannot_command_a_terminal(suffix, here, capsys):
    state = {**NET.state_dict(), "1.\x1b[31mweight": torch.ones(2)}
    save_tensors(Path("it.safetensors"), state)
    save_tensors(Path("fine.safetensors"), NET.state_dict())
    torch.save(state, "it.pt")
    for arguments in READERS.values():
        with pytest.raises(SystemExit):
            called([*arguments, f"it.{suffix}"])
        said = capsys.readouterr()
        assert "\x1b[31m" not in said.out + said.err


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefghijk")
)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: " + "[" * 1999 + "]" * 1999, "more than 100 levels"),
        (LAUGHS, "aliases included"),
        ("model: &a {b: [*a]}", "aliases included"),
    ],
)
def test_configurations_that_grow_are_refused_before_they_do(text, words, here, capsys):
    Path("it.yaml").write_text(text)
    for arguments in (["fit", "-c"], ["compare", *BANK_OF, "fine", "--data"]):
        with pytest.raises(SystemExit):
            called([*arguments, "it.yaml"])
        assert words in capsys.readouterr().err
    few = "\n".join(LAUGHS.splitlines()[:4])
    assert len(settings_of_text(few, "few")["d"]) == 9  # the negative control


@pytest.mark.bad_input
def test_deep_json_is_damaged_and_a_strangers_card_is_none(here):
    """The reports of a doctor, the rows of a comparison, the card of a reference."""
    Path("deep.json").write_text("[" * 200_000 + "]" * 200_000)
    for read in (Report.read, Card.read, read_json):
        with pytest.raises(ValueError, match=r"deep\.json is "):
            read(Path("deep.json"))
    Path("fine/card.yaml").write_text("network: trust me")
    assert bank_card(Path("fine")) == {}
    assert "network" in bank_card(shipped_path("mnist_optunets"))

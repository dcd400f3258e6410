"""What a user types or writes wrongly ends in one short sentence that names it; a bug does not."""

import os
import shlex

import lightning as L
import pytest
import torch
import yaml
from shell import code_of

from lightning_bnn.cli import main
from lightning_bnn.commands.presets import preset_text
from weightsym.networks.files.settings import settings_of_text

pytestmark = [pytest.mark.bad_input, pytest.mark.filterwarnings("ignore")]
GOOD = preset_text("digits_ensemble")
NETWORK = "--model.init_args.network"


def changed(old, new):
    assert old in GOOD
    return GOOD.replace(old, new).encode()


FILES = {
    "good.yaml": GOOD.encode(),
    "class.yaml": changed("class_path:", "classpath:"),
    "inner.yaml": changed("class_path: lightning_bnn.models", "clas_path: lightning_bnn.models"),
    "group.yaml": changed("trainer:", "trainr:"),
    "key.yaml": changed("max_epochs:", "max_epoch:"),
    "option.yaml": changed("members:", "memberz:"),
    "name.yaml": changed("class_path: DeepEnsemble", "class_path: DeepEnsembel"),
    "type.yaml": changed("members: 5", "members: many"),
    "deep.yaml": changed("hidden: [32, 32]", "hidden: 32"),
    "binary.yaml": bytes(range(128, 256)),
    "syntax.yaml": b"a: [1, 2\nb: }",
    "zeros.yaml": bytes(3),
    "text.yaml": b"just text",
    "empty.yaml": b"",
    "words.md": b"hello",
    "broken.ckpt": b"PK\x03\x04" + 100 * b"junk",
}


@pytest.fixture(scope="module")
def typed_in(tmp_path_factory):
    """A folder with the files that a mistake needs."""
    folder = tmp_path_factory.mktemp("typed")
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    (folder / "folder").mkdir()
    torch.save({"weight": torch.ones(2)}, folder / "weights.ckpt")
    other = {"state_dict": {"a": torch.ones(2)}, "pytorch-lightning_version": L.__version__}
    torch.save(other, folder / "other.ckpt")
    return folder


CONFIGURATIONS = [
    ("fit -c class.yaml", "class.yaml", "`model.classpath`", "`class_path`"),
    ("fit -c inner.yaml", "inner.yaml", "network.clas_path", "`class_path`"),
    ("fit -c group.yaml", "group.yaml", "'trainr.max_epochs'", "'trainer.max_epochs'"),
    ("fit -c key.yaml", "key.yaml", "'trainer.max_epoch'", "'trainer.max_epochs'"),
    ("fit -c option.yaml", "option.yaml", "'memberz'", "'members'"),
    ("fit -c name.yaml", "name.yaml", "'DeepEnsembel'", "'DeepEnsemble'"),
    ("fit -c type.yaml", "type.yaml", "`model.members` must be int or a list of int, got many"),
    ("fit -c deep.yaml", "deep.yaml", "`model.network.hidden` must be a list of int, got 32"),
    ("fit -c binary.yaml", "binary.yaml", "UTF-8"),
    ("fit -c zeros.yaml", "zeros.yaml"),
    ("fit -c syntax.yaml", "syntax.yaml", "line 2"),
    ("fit -c text.yaml", "text.yaml", "just text"),
    ("fit -c empty.yaml", "empty.yaml"),
    ("fit -c folder", "folder"),
    ("fit -c none.yaml", "none.yaml"),
    ("compare words.md --posteriors.A words.md --data text.yaml", "text.yaml", "just text"),
    ("population --config class.yaml --members 2 --bank b", "class.yaml", "`class_path`"),
]
OPTIONS = [
    ("fit -c good.yaml --trainer.max_epoch 4", "--trainer.max_epoch`", "`--trainer.max_epochs`"),
    ("fit -c good.yaml --modle.init_args.members 4", "`--model`"),
    (f"fit -c good.yaml {NETWORK}.init_args.hiden [3]", "'hiden'", "'hidden'"),
    ("test -c good.yaml --ckpt_pat x", "`--ckpt_path`"),
    ("presets a b", "b"),
    ("fit -c", "-c/--config"),
    ("presets digits_swga", "'digits_swga'", "'digits_swag'"),
    ("fitt", "'fitt'", "'fit'"),
    ("nix", "there is no command 'nix'; choose from: demo, presets, fit"),
    ("presets nix", "there is no preset 'nix'; `lightning-bnn presets`"),
    ("fit", "data", "model", "presets"),
]
VALUES = [
    ("fit -c good.yaml --trainer.max_epochs -3", "max_epochs", "-3"),
    ("fit -c good.yaml --trainer.default_root_dir words.md", "words.md"),
    ("fit -c good.yaml --trainer.precision 7", "trainer.precision", "got 7"),
    ("fit -c good.yaml --trainer.accelerator mps", "accelerator=mps"),
    (f"fit -c good.yaml {NETWORK}.init_args.hidden [-1]", "`hidden[0]`", "-1"),
    (f"fit -c good.yaml {NETWORK} lightning_bnn.models.mlpp", "mlpp", "'mlp'"),
    (f"fit -c good.yaml {NETWORK} torch.nn.Linear {NETWORK}.in_features -2 "
     f"{NETWORK}.out_features 3", "negative dimension -2"),
    ("fit -c good.yaml --model.optimizer.lr fast", "optimizer.lr", "float", "fast"),
    ("fit -c good.yaml --model.optimizer torch.optim.AdamX", "`model.optimizer`", "'Adam'?"),
    ("fit -c good.yaml --model torch.nn.Linear", "torch.nn.Linear", "LightningModule"),
    ("fit -c good.yaml --model NoSuch", "there is no class 'NoSuch'"),
    ("fit -c good.yaml --model.init_args.members 0", "`members` must be at least 1, got 0."),
    ("fit -c good.yaml --data MNIST --data.init_args.root x", "MNIST was not found in"),
    ("fit -c good.yaml --data TwoGaussians", "does not take inputs of shape (10, 2)"),
    ("fit -c good.yaml --trainer.logger TensorBoardLogger --trainer.logger.save_dirr x",
     "`trainer.logger`", "'save_dirr'", "'save_dir'"),
    (f"fit -c good.yaml {NETWORK} json.dumps", "json.dumps does not say what it returns"),
    (f"fit -c good.yaml {NETWORK} json.JSONDecoder", "json.JSONDecoder is not a Module"),
    ("test 'runs of mine/version_0'", "'runs of mine/version_0'", "-c FOLDER/config.yaml"),
    ("symmetries lightning_bnn.models.mlp --input 1,4 --init.hidden 3 --init.inputs 4 "
     "--init.outputs 2", "`hidden`", "3"),
]  # fmt: skip
CHECKPOINTS = [
    ("fit -c good.yaml --ckpt_path words.md", "words.md"),
    ("fit -c good.yaml --ckpt_path no.ckpt", "no.ckpt"),
    ("validate -c good.yaml --ckpt_path broken.ckpt", "broken.ckpt"),
    ("predict -c good.yaml --ckpt_path weights.ckpt", "weights.ckpt"),
    ("validate -c good.yaml --ckpt_path best", "best"),
    ("validate -c good.yaml --ckpt_path other.ckpt", "other.ckpt does not match",
     "another LightningModule"),
]  # fmt: skip


@pytest.mark.parametrize("case", [*CONFIGURATIONS, *OPTIONS, *VALUES, *CHECKPOINTS], ids=" ".join)
def test_a_mistake_is_one_sentence_that_names_it(case, typed_in, monkeypatch, capsys):
    line, *names = case
    monkeypatch.chdir(typed_in)
    cheap = ["--trainer.logger=false", "--trainer.enable_checkpointing=false"]
    with pytest.raises(SystemExit) as end:
        main([*shlex.split(line), *(cheap if "-c good.yaml" in line else [])])
    assert end.value.code == 2
    told = [t for t in capsys.readouterr().err.splitlines() if t.startswith("lightning-bnn: ")]
    (sentence,) = told
    assert all(name in sentence for name in names)
    assert "usage:" not in sentence
    assert "Union" not in sentence
    assert len(sentence) < 500


def test_a_reader_that_has_seen_enough_is_no_mistake(monkeypatch, capsys):
    """As in `lightning-bnn presets | head -1`."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        with pytest.raises(SystemExit) as end:
            main(["presets"])
    assert end.value.code == 141  # as of a process that SIGPIPE ends
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("place", "bug"),
    [
        ("lightning_bnn.modules.members.template_of", KeyError("ours")),
        ("lightning.pytorch.trainer.trainer._CallbackConnector.on_trainer_init", AttributeError()),
        ("lightning.pytorch.Trainer.fit", IndexError("ours")),
    ],
)
def test_a_bug_keeps_its_traceback(place, bug, typed_in, monkeypatch):
    def broken(*_, **__):
        raise bug

    monkeypatch.chdir(typed_in)
    monkeypatch.setattr(place, broken)
    with pytest.raises((type(bug), ValueError)) as caught:  # jsonargparse wraps what it calls
        main(["fit", "-c", "good.yaml", "--trainer.logger=false"])
    error = caught.value
    while error is not bug:
        error = error.__cause__ or error.__context__


def test_what_is_written_correctly_is_not_corrected(typed_in, monkeypatch, capsys):
    """The negative control: arguments of a class of the user that look like keys."""
    monkeypatch.chdir(typed_in)
    (typed_in / "look_alike.py").write_text(
        "import torch\nclass Net(torch.nn.Linear):\n    def __init__(self, classpath: int, "
        "init_arg: dict):\n        super().__init__(64, classpath)\n"
    )
    held = yaml.safe_load(GOOD)
    own = {"class_path": "look_alike.Net", "init_args": {"classpath": 10, "init_arg": {"a": 1}}}
    held["model"]["init_args"]["network"] = own
    (typed_in / "alike.yaml").write_text(yaml.safe_dump(held))
    assert code_of("fit", "--config=alike.yaml", "--print_config") in (0, None)
    assert "max_epochs: 20" in capsys.readouterr().out
    for key in ("ckpt_path", "data_path", "init_std", "path", "class_weights"):
        text = f"trainer:\n  {key}: some/text\nmodel:\n  {key}: {{a: 1}}\n{key}: some/text\n"
        assert settings_of_text(text, "it.yaml")["trainer"][key] == "some/text"

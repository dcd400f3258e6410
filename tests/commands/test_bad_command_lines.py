"""What a user types or writes wrongly ends in one short sentence that names it; a bug does not."""

import os
import shlex

import lightning as L
import pytest
import torch
import yaml

from lightning_bnn.cli import main
from lightning_bnn.commands.presets import preset_text
from weightsym.settings_files import settings_of_text

pytestmark = [pytest.mark.bad_input, pytest.mark.filterwarnings("ignore")]
GOOD = preset_text("digits_ensemble")
NETWORK = "--model.init_args.network"


def changed(old, new):
    assert old in GOOD
    return GOOD.replace(old, new).encode()


FILES = {
    "good.yaml": GOOD.encode(),
    "class.yaml": changed("class_path:", "classpath:"),
    "args.yaml": changed("init_args:", "initargs:"),
    "inner.yaml": changed("class_path: lightning_bnn.models", "clas_path: lightning_bnn.models"),
    "group.yaml": changed("trainer:", "trainr:"),
    "key.yaml": changed("max_epochs:", "max_epoch:"),
    "option.yaml": changed("members:", "memberz:"),
    "name.yaml": changed("class_path: DeepEnsemble", "class_path: DeepEnsembel"),
    "type.yaml": changed("members: 5", "members: many"),
    "deep.yaml": changed("hidden: [32, 32]", "hidden: 32"),
    "binary.yaml": bytes(range(128, 256)),
    "zeros.yaml": bytes(3),
    "syntax.yaml": b"a: [1, 2\nb: }",
    "text.yaml": b"just text",
    "empty.yaml": b"",
    "words.md": b"hello",
    "empty.ckpt": b"",
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
    ("fit -c args.yaml", "args.yaml", "`model.initargs`", "`init_args`"),
    ("fit -c inner.yaml", "inner.yaml", "network.clas_path", "`class_path`"),
    ("fit -c group.yaml", "group.yaml", "'trainr.max_epochs'", "'trainer.max_epochs'"),
    ("fit -c key.yaml", "key.yaml", "'trainer.max_epoch'", "'trainer.max_epochs'"),
    ("fit -c option.yaml", "option.yaml", "'memberz'", "'members'"),
    ("fit -c name.yaml", "name.yaml", "'DeepEnsembel'", "'DeepEnsemble'"),
    ("fit -c type.yaml", "type.yaml", "`model.members` must be int or a list of int, got many"),
    ("fit -c deep.yaml", "deep.yaml", "`model.network.hidden` must be a list of int, got 32"),
    ("fit -c binary.yaml", "binary.yaml", "UTF-8"),
    ("fit -c syntax.yaml", "syntax.yaml", "line 2"),
    ("fit -c text.yaml", "text.yaml", "just text"),
    ("fit -c empty.yaml", "empty.yaml"),
    ("fit -c folder", "folder"),
    ("fit -c none.yaml", "none.yaml"),
    ("mass --config binary.yaml", "binary.yaml", "UTF-8"),
    ("mass --networks words.md --data text.yaml", "text.yaml", "just text"),
    ("population --config class.yaml --members 2 --bank b", "class.yaml", "`class_path`"),
    ("population --config zeros.yaml --members 2 --bank b", "zeros.yaml"),
]
OPTIONS = [
    ("fit -c good.yaml --trainer.max_epoch 4", "--trainer.max_epoch`", "`--trainer.max_epochs`"),
    ("fit -c good.yaml --modle.init_args.members 4", "`--model`"),
    ("fit -c good.yaml --model.init_args.member 4", "'member'", "'members'"),
    (f"fit -c good.yaml {NETWORK}.init_args.hiden [3]", "'hiden'", "'hidden'"),
    ("test -c good.yaml --ckpt_pat x", "`--ckpt_path`"),
    ("presets a b", "b"),
    ("fit -c", "-c/--config"),
    ("presets digits_swga", "'digits_swga'", "'digits_swag'"),
    ("fitt", "'fitt'", "'fit'"),
    ("nix", "there is no command 'nix'; choose from: fit"),
    ("presets nix", "there is no preset 'nix'; `lightning-bnn presets`"),
    ("--fit", "'--fit'", "'fit'"),
    ("fit", "data", "model", "presets"),
]
VALUES = [
    ("fit -c good.yaml --trainer.max_epochs many", "trainer.max_epochs", "int", "many"),
    ("fit -c good.yaml --trainer.max_epochs -3", "max_epochs", "-3"),
    ("fit -c good.yaml --trainer.precision 7", "trainer.precision", "got 7"),
    ("fit -c good.yaml --trainer.accelerator nix", "accelerator", "nix"),
    ("fit -c good.yaml --seed_everything many", "seed_everything", "many"),
    ("fit -c good.yaml --trainer.default_root_dir words.md", "words.md"),
    (f"fit -c good.yaml {NETWORK}.init_args.hidden [-1]", "`hidden[0]`", "-1"),
    (f"fit -c good.yaml {NETWORK} lightning_bnn.models.mlpp", "mlpp", "'mlp'"),
    (f"fit -c good.yaml {NETWORK} torch.nn.Linear {NETWORK}.in_features -2 "
     f"{NETWORK}.out_features 3", "negative dimension -2"),
    ("fit -c good.yaml --model.optimizer.lr fast", "optimizer.lr", "float", "fast"),
    ("fit -c good.yaml --model torch.nn.Linear", "torch.nn.Linear", "LightningModule"),
    ("fit -c good.yaml --model NoSuch", "there is no class 'NoSuch'"),
    ("fit -c good.yaml --trainer.callbacks+ NoSuch", "there is no class 'NoSuch'"),
    ("fit -c good.yaml --model.init_args.members 0", "`members` must be at least 1, got 0."),
    ("fit -c good.yaml --data MNIST --data.init_args.root x", "MNIST was not found in"),
    ("fit -c good.yaml --data TwoGaussians", "does not take inputs of shape (10, 2)"),
    ("fit -c good.yaml --trainer.logger TensorBoardLogger --trainer.logger.save_dirr x",
     "`trainer.logger`", "'save_dirr'", "'save_dir'"),
    (f"fit -c good.yaml {NETWORK} json.dumps", "json.dumps is no Module"),
    ("symmetries lightning_bnn.models.mlp --input 1,4 --init.hidden 3 --init.inputs 4 "
     "--init.outputs 2", "`hidden`", "3"),
]  # fmt: skip
ENGINES = [
    ("population --config good.yaml --members 2 --bank b --engine slurm --options "
     "'{\"nix\": 1}'", "`options`", "nix"),
    ("population --config good.yaml --members 2 --bank b --engine slurm --options "
     "'{\"cluster\": \"nix\"}'", "`options`", "nix"),
    ("population --config good.yaml --members 2 --bank b --engine ray --options "
     "'{\"nix\": 1}'", "`options`", "nix"),
]  # fmt: skip
CHECKPOINTS = [
    ("fit -c good.yaml --ckpt_path words.md", "words.md"),
    ("fit -c good.yaml --ckpt_path no.ckpt", "no.ckpt"),
    ("test -c good.yaml --ckpt_path empty.ckpt", "empty.ckpt"),
    ("validate -c good.yaml --ckpt_path broken.ckpt", "broken.ckpt"),
    ("predict -c good.yaml --ckpt_path weights.ckpt", "weights.ckpt"),
    ("fit -c good.yaml --ckpt_path folder", "folder"),
    ("validate -c good.yaml --ckpt_path best", "best"),
    (
        "validate -c good.yaml --ckpt_path other.ckpt",
        "other.ckpt does not fit",
        "another LightningModule",
    ),
]


@pytest.mark.cluster
@pytest.mark.parametrize("case", ENGINES, ids=lambda case: case[0][40:])
def test_options_of_an_engine(case, typed_in, monkeypatch, capsys):
    pytest.importorskip("ray")
    pytest.importorskip("submitit")
    test_a_mistake_is_one_sentence_that_names_it(case, typed_in, monkeypatch, capsys)


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is no mistake here")
def test_an_accelerator_that_is_not_there(typed_in, monkeypatch, capsys):
    monkeypatch.chdir(typed_in)
    with pytest.raises(SystemExit) as end:
        main(["fit", "-c", "good.yaml", "--trainer.accelerator", "cuda"])
    assert end.value.code == 2
    assert "accelerator=cuda" in capsys.readouterr().err


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


def chain(error):
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@pytest.mark.parametrize(
    ("place", "bug"),
    [
        ("lightning_bnn.modules.DeepEnsemble.__init__", KeyError("ours")),
        ("lightning.pytorch.trainer.trainer._CallbackConnector.on_trainer_init", AttributeError()),
        ("lightning.pytorch.Trainer.fit", IndexError("ours")),
        ("lightning_bnn.datamodules.Digits.setup", AssertionError("ours")),
    ],
)
def test_a_bug_keeps_its_traceback(place, bug, typed_in, monkeypatch):
    def broken(*_, **__):
        raise bug

    monkeypatch.chdir(typed_in)
    monkeypatch.setattr(place, broken)
    with pytest.raises((type(bug), ValueError)) as caught:  # jsonargparse wraps what it calls
        main(["fit", "-c", "good.yaml", "--trainer.logger=false"])
    assert bug in chain(caught.value)


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
    for name in ("good.yaml", "alike.yaml"):
        with pytest.raises(SystemExit) as end:
            main(["fit", f"--config={name}", "--print_config"])
        assert end.value.code in (0, None)
        assert "max_epochs: 20" in capsys.readouterr().out


@pytest.mark.parametrize("key", ["ckpt_path", "data_path", "init_std", "path", "class_weights"])
def test_names_that_only_resemble_ours_are_left_alone(key):
    text = f"trainer:\n  {key}: some/text\nmodel:\n  {key}: {{a: 1}}\n{key}: some/text\n"
    assert settings_of_text(text, "it.yaml")["trainer"][key] == "some/text"

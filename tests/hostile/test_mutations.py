"""Files with thousands of changes give what is in them or one sentence, and touch nothing else."""

import io
import json
import random
import shutil
import tarfile
import zipfile

import pytest
import torch
from mutations import changed_bytes, changed_json, dumped, one_sentence
from small_banks import networks, signed, small_bank, unsigned

from lightning_bnn.bank import CheckpointBank, import_files
from lightning_bnn.hub import from_hub, write_folder
from lightning_bnn.posteriors import DiagonalGaussian, Empirical, LowRankGaussian, Mixture
from lightning_bnn.posteriors.laplace import CurvatureBlock, LaplaceGaussian
from weightsym import params as P
from weightsym.files import open_network, save_tensors

pytestmark = pytest.mark.bad_input
SEEDS = pytest.mark.parametrize(
    "seed", [0, *(pytest.param(k, marks=pytest.mark.e2e) for k in range(1, 3))]
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder for files; what is beside it stays as it is."""
    (tmp_path / "x").write_text("somebody else's")
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    yield folder
    assert {path.name for path in tmp_path.iterdir()} == {"x", "folder"}
    assert (tmp_path / "x").read_text() == "somebody else's"


def all_of(bank):
    bank.verify()
    return bank[:], list(bank.blocks(1)), bank.records, bank.shapes, bank.nbytes, repr(bank)


def added(path, folder):
    """All networks of a file, in a new bank."""
    shutil.rmtree(folder, ignore_errors=True)
    with CheckpointBank(folder) as bank:
        import_files(bank, path)
        return all_of(bank)


def stored(path):
    network = open_network(path)
    return {name: network.read(name) for name in network.tensors}


def counted(outcomes):
    """Some files must have been read, and most refused, or the changes are of no use."""
    read = sum(outcome is not None for outcome in outcomes)
    assert 0 < read < len(outcomes) / 2


# ------------------------------------------------------------ banks
@SEEDS
def test_manifests(seed, here):
    dice, outcomes = random.Random(seed), []
    small_bank(here / "it")
    manifest = (here / "it" / "manifest.jsonl").read_bytes()
    numbers = (here / "it" / "networks.bin").read_bytes()

    def opened(mode):
        with CheckpointBank(here / "it", mode) as bank:
            return all_of(bank)

    for turn in range(250):
        content = changed_bytes(manifest, dice)
        if turn % 5:
            content = signed(changed_json(unsigned(manifest), dice))
        for mode in "ra":
            (here / "it" / "manifest.jsonl").write_bytes(content)
            outcomes.append(one_sentence(opened, mode))
            assert (here / "it" / "networks.bin").read_bytes() == numbers
    counted(outcomes)


# ------------------------------------------------------------ bundles
def net():
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))


def bundles(folder):
    """A folder of every kind."""
    gaussian = DiagonalGaussian(P.of(net()), 0.3)
    block = CurvatureBlock(("2.weight",), torch.rand(1, 3), torch.eye(1), torch.eye(3))
    laplace = LaplaceGaussian(P.of(net()), [block], last_layer="2", temperature=0.5)
    bank = CheckpointBank(folder / "bank", dtype=torch.float16)
    bank.extend(P.populate(net(), 4), [{"step": k, "metrics": {"loss": k / 3}} for k in range(4)])
    sources = {
        "gaussian": gaussian,
        "low rank": LowRankGaussian.fit(P.populate(net(), 6), 3, 0.1),
        "laplace": laplace,
        "networks": Empirical(P.populate(net(), 4), [0, 0, 1, 1]),
        "mixture": Mixture([Mixture([laplace, gaussian]), gaussian], [0.2, 0.8]),
        "bank of halves": bank,
    }
    for name, source in sources.items():
        write_folder(source, folder / name)
    return [folder / name for name in sources]


@SEEDS
def test_indices(seed, here):
    dice, outcomes = random.Random(seed), []
    folders = bundles(here)

    def got(folder):
        shutil.rmtree(here / "new", ignore_errors=True)
        found = from_hub(folder, folder=here / "new", network=net())
        if isinstance(found, CheckpointBank):
            return all_of(found)
        return (
            found.sample(3),
            found.modes(),
            repr(found),
            found.predict(net(), torch.ones(4, 2), 3),
        )

    for turn in range(120):
        folder = dice.choice(folders)
        content = (folder / "contents.json").read_bytes()
        other = changed_bytes(content, dice) if turn % 6 == 0 else None
        (folder / "contents.json").write_bytes(
            other or dumped(changed_json(json.loads(content), dice))
        )
        outcomes.append(one_sentence(got, folder))
        (folder / "contents.json").write_bytes(content)
        assert not [path for path in here.iterdir() if path.name.startswith(".")]
    counted(outcomes)


# ------------------------------------------------------------ networks in files
def archive_of(content, name):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz", compresslevel=1) as tar:
        entry = tarfile.TarInfo(name)
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))
    return file.getvalue()


@SEEDS
def test_safetensors_and_archives_of_them(seed, here):
    dice, outcomes = random.Random(seed), []
    save_tensors(here / "it.safetensors", networks(3))
    whole = (here / "it.safetensors").read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:start])
    for turn in range(200):
        content = changed_bytes(whole, dice, last=start)
        if turn % 4:
            other = dumped(changed_json(header, dice))
            content = len(other).to_bytes(8, "little") + other + whole[start:]
        (here / "it.safetensors").write_bytes(content)
        outcomes.append(one_sentence(stored, here / "it.safetensors"))
        name = dice.choice(["models/a.safetensors", "../../x.safetensors", "/x.safetensors", "x"])
        archive = archive_of(content, name)
        (here / "it.tgz").write_bytes(archive if turn % 3 else changed_bytes(archive, dice))
        outcomes.append(one_sentence(added, here / "it.tgz", here / "new"))
    counted(outcomes)


def zipped_anew(content, dice):
    """An archive of torch whose parts are changed, and its checksums right."""
    source, file = zipfile.ZipFile(io.BytesIO(content)), io.BytesIO()
    with zipfile.ZipFile(file, "w") as target:
        for entry in source.infolist():
            part, name = source.read(entry), entry.filename
            if name.endswith("data.pkl") or dice.random() < 0.1:
                part = changed_bytes(part, dice)
            if dice.random() > 0.05:
                target.writestr("../" * (dice.random() < 0.05) + name, part)
    return file.getvalue()


@SEEDS
def test_checkpoints(seed, here):
    dice, outcomes, states = random.Random(seed), [], []
    checkpoint = {"state_dict": networks(3), "global_step": 3, "epoch": 1, "x": [1, {"a": (2.5,)}]}
    for is_zip in (True, False):
        for state in (networks(3), checkpoint):
            torch.save(state, here / "it.pt", _use_new_zipfile_serialization=is_zip)
            states.append((here / "it.pt").read_bytes())
    for turn in range(150):
        content = dice.choice(states)
        is_zip = content[:2] == b"PK" and turn % 5
        (here / "it.pt").write_bytes((zipped_anew if is_zip else changed_bytes)(content, dice))
        outcomes.append(one_sentence(stored, here / "it.pt"))
        outcomes.append(one_sentence(added, here / "it.pt", here / "new"))
    counted(outcomes)

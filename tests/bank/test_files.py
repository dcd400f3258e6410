"""Checkpoints of other runs and published archives, in and out."""

import io
import random
import tarfile

import lightning as L
import pytest
import torch
from runs import QUIET
from safetensors.torch import save, save_file
from shell import failure

from lightning_bnn import models
from lightning_bnn.bank import CheckpointBank, export_files, import_files, labelled_networks
from lightning_bnn.cli import main
from weightsym import discover, permute, random_permutations
from weightsym import params as P


class User(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.head = models.mlp(4, [3], 2), torch.nn.Linear(2, 2)

    def training_step(self, batch, _):
        return self.head(self.net(batch[0])).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def equal(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_folder_of_lightning_checkpoints(tmp_path):
    data = torch.utils.data.TensorDataset(torch.randn(16, 4))
    keep = L.pytorch.callbacks.ModelCheckpoint(tmp_path / "runs", save_top_k=-1)
    options, module = {**QUIET, "enable_checkpointing": True, "callbacks": [keep]}, User()
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    L.Trainer(**options, max_epochs=11).fit(module, loader)
    bank = CheckpointBank(tmp_path / "bank")
    assert import_files(bank, tmp_path / "runs", like=module.net) == 11
    assert [r["epoch"] for r in bank.records] == list(range(11))  # 9 before 10
    assert bank.records[-1]["step"] == 22
    equal(bank[-1], P.of(module.net))
    assert set(bank.names) == set(P.of(module.net))  # without the head


def test_round_trip(tmp_path):
    stack = P.populate(models.mlp(4, [3], 2), 12)
    bank = CheckpointBank(tmp_path / "a")
    bank.extend(stack)
    files = export_files(bank, tmp_path / "files")
    assert [f.name for f in files[:2]] == ["network-00.safetensors", "network-01.safetensors"]
    other = CheckpointBank(tmp_path / "b")
    assert import_files(other, tmp_path / "files") == 12
    equal(other[:], stack)
    assert other.records[3] == {"file": "network-03.safetensors"}


def archive(path, stack, rows):
    """A gzipped tar file of safetensors, one per network."""
    with tarfile.open(path, "w:gz") as tar:
        for row in rows:
            content = save({k: v[row].contiguous() for k, v in stack.items()})
            info = tarfile.TarInfo(f"some/folder/{row}.safetensors")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        tar.addfile(tarfile.TarInfo("some/notes.txt"))
    return path


def test_published_archives(tmp_path):
    """In folders of models, in float16."""
    stack = {k: v.half() for k, v in P.populate(models.optunet(), 5).items()}
    folder = tmp_path / "models" / "mnist-optunet"
    folder.mkdir(parents=True)
    for first, stop in ((0, 3), (3, 5)):
        archive(folder / f"mnist-optunet-{first}-{stop - 1}.tgz", stack, range(first, stop))
    bank = CheckpointBank(tmp_path / "bank")
    assert import_files(bank, folder) == 5
    equal(bank[:], stack)
    assert bank.records[4] == {"file": "mnist-optunet-3-4.tgz/some/folder/4.safetensors"}
    some = CheckpointBank(tmp_path / "some")
    assert import_files(some, folder / "mnist-optunet-0-2.tgz") == 3


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("place", "options", "message"),
    [
        ("none", {}, "There is no .ckpt, .pt, .pth, .safetensors, .tgz file in"),
        ("bad.tgz", {}, "bad.tgz is damaged"),
        ("one", {"prefix": "net."}, "has no names that start with 'net.'"),
        ("one", {"like": models.optunet()}, "does not fit: it lacks"),
        (".", {"pattern": "*/*"}, "two/b.safetensors holds a network of .*'w' differs"),
    ],
)
def test_errors(place, options, message, tmp_path):
    for folder in ("none", "one", "two"):
        (tmp_path / folder).mkdir()
    (tmp_path / "bad.tgz").write_bytes(b"\x1f\x8b no archive")
    for size, name in ((2, "one/a"), (3, "two/b")):
        save_file({"w": torch.zeros(size)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match=message):
        import_files(CheckpointBank(tmp_path / "bank"), tmp_path / place, **options)


@pytest.mark.bad_input
def test_a_damaged_archive_is_named_or_read(tmp_path):
    """Gzip has a CRC of all that it holds: what is read to its end is what was written."""
    stack = P.populate(models.mlp(4, [3], 2), 3)
    path = archive(tmp_path / "x.tgz", stack, range(3))
    content, dice, named = path.read_bytes(), random.Random(0), 0
    for k in range(40):
        place, bit = dice.randrange(len(content)), 1 << dice.randrange(8)
        flipped = content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :]
        path.write_bytes([flipped, content[:place], content[:place] + bytes(40)][k % 3])
        with CheckpointBank(tmp_path / str(k)) as other:
            try:
                import_files(other, path)
            except ValueError as error:
                named += f"Archive {path} is damaged" in str(error)
            else:
                equal(other[:], stack)
    assert named > 30


def test_the_command_adds_shows_and_exports(tmp_path, capsys):
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
    assert "all files match their checksums" in out
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 3
    assert "There is no bank at" in failure(capsys, "bank", tmp_path / "none")


# ------------------------------------------------------------ labels
def test_a_bank_as_a_data_set(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    sym = discover(net, torch.randn(5, 3))
    networks = P.populate(net, 6)
    moved = permute(networks, sym, random_permutations(sym, torch.Generator().manual_seed(0), 6))
    banks = [CheckpointBank(tmp_path / name) for name in "ab"]
    for bank, stack in zip(banks, (networks, moved), strict=True):
        bank.extend(stack, [{"step": k, "metrics": {"acc": k / 7}} for k in range(6)])
    a, b = (labelled_networks(bank, "metrics.acc", sym) for bank in banks)
    torch.testing.assert_close(a[:], b[:])
    assert a[:][1].tolist() == pytest.approx([k / 7 for k in range(6)])
    raw = [labelled_networks(bank, "step") for bank in banks]
    assert not torch.allclose(raw[0][:][0], raw[1][:][0])
    assert raw[0][5][1] == 5
    with pytest.raises(ValueError, match="'metrics' is not a number in every record"):
        labelled_networks(banks[0], "metrics")

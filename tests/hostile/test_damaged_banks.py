"""A damaged or foreign bank gives its networks or one sentence, and no file of it is lost."""

import random
import re

import pytest
import torch
from small_banks import contents, networks, refused_or_read, restore, signed, small_bank, unsigned

from lightning_bnn.bank import CheckpointBank, export_files
from lightning_bnn.cli import main

pytestmark = pytest.mark.bad_input


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A bank with forgotten networks: what it holds, and all of its bytes."""
    folder = tmp_path_factory.mktemp("sound")
    states = small_bank(folder)
    return states, contents(folder)


# ------------------------------------------------------------ damage by chance
def flipped(content, dice):
    place = dice.randrange(len(content))
    return content[:place] + bytes([content[place] ^ 1 << dice.randrange(8)]) + content[place + 1 :]


def cut(content, dice):
    return content[: dice.randrange(len(content))]


def zeroed(content, dice):
    first, last = sorted(dice.randrange(len(content) + 1) for _ in range(2))
    return content[:first] + bytes(last - first) + content[last:]


def reordered(content, dice):
    """A line that is lost, doubled or put elsewhere; the last two stay, or it could be a crash."""
    lines = content.splitlines(keepends=True)
    chosen = lines.pop(dice.randrange(len(lines) - 2))
    for _ in range(dice.randrange(3)):
        lines.insert(dice.randrange(len(lines) - 1), chosen)
    return b"".join(lines)


@pytest.mark.parametrize("damage", [flipped, cut, zeroed, reordered])
def test_a_damaged_bank_is_refused_or_read(damage, sound, tmp_path, caplog):
    """Lines of a manifest have an order; one that has lost its end is an earlier one."""
    states, files = sound
    dice = random.Random(damage.__name__)
    of_lines, of_networks = damage is reordered, damage in (cut, zeroed)
    for turn in range(50):
        lines = of_lines or (turn % 2 and not of_networks)
        name = "manifest.jsonl" if lines else "networks.bin"
        restore(tmp_path, {**files, name: damage(files[name], dice)})
        refused_or_read(tmp_path, states, caplog)


@pytest.mark.parametrize("order", [[0, 2, 1, 3], [0, 1, 3], [0, 1, 1, 2, 3], [0, 3, 2, 1]])
def test_lines_have_their_places(order, tmp_path):
    """Networks that are all the same: no checksum of theirs tells which record is whose."""
    with CheckpointBank(tmp_path) as bank:
        for step in range(3):
            bank.append({"w": torch.ones(2)}, step=step)
    manifest = tmp_path / "manifest.jsonl"
    lines = manifest.read_bytes().splitlines(keepends=True)
    for mode in "ra":
        assert len(CheckpointBank(tmp_path, mode)) == 3  # the control
        manifest.write_bytes(b"".join(lines[k] for k in order))
        with pytest.raises(ValueError, match=r"Line \d of .* is damaged .it differs from its"):
            CheckpointBank(tmp_path, mode)
        manifest.write_bytes(b"".join(lines))


def test_values_of_a_manifest_whose_checksums_are_right(sound, tmp_path):
    """Somebody who can compute a CRC is told in a sentence, too."""
    states, files = sound
    manifest = files["manifest.jsonl"]
    restore(tmp_path, {**files, "manifest.jsonl": signed(unsigned(manifest))})
    assert torch.equal(CheckpointBank(tmp_path, "r")[:]["w"], states[-1][0]["w"])  # the control
    for name, value, message in (
        ("dtype", "Tensor", "'Tensor' is not a numeric dtype"),
        ("dtype", "int8", "must be a floating type"),
        ("tensors", {}, "it names no tensors"),
        *(
            ("tensors", {"w": [dtype, [2], True]}, f"'{dtype}' is not a numeric dtype")
            for dtype in ("quint8", "qint32", "bits8", "bits16", "float4_e2m1fn_x2", "int4")
        ),
        *(
            ("tensors", {"w": ["float32", shape, True]}, "Line 1 of .* is damaged")
            for shape in ([2**80], [2**62, 4], [0, 2**62, 2**62], [10**400], [-1], [0.5], "22", 3)
        ),
        *(("bank", version, f"has format {version}, but this version") for version in (0, 1, 99)),
    ):
        first, *others = unsigned(manifest)
        restore(tmp_path, {**files, "manifest.jsonl": signed([{**first, name: value}, *others])})
        for mode in "ar":
            with pytest.raises(ValueError, match=message):
                CheckpointBank(tmp_path, mode)


# ------------------------------------------------------------ lost lines, lost files
@pytest.mark.parametrize("content", [b"", bytes(600), b"half a header"])
def test_a_manifest_that_has_lost_everything(content, sound, tmp_path):
    restore(tmp_path, {**sound[1], "manifest.jsonl": content})
    for mode in "ar":
        with pytest.raises(ValueError, match="does not match networks.bin, .* restore a copy"):
            CheckpointBank(tmp_path, mode)
    assert contents(tmp_path) == {**sound[1], "manifest.jsonl": content}


@pytest.mark.parametrize("name", ["networks.bin", "manifest.jsonl", ".lock"])
def test_links_are_not_followed(name, sound, tmp_path):
    """Neither written to nor absorbed."""
    folder, elsewhere = tmp_path / "bank", tmp_path / "elsewhere"
    folder.mkdir()
    restore(folder, {".lock": b"", **sound[1]})
    (folder / name).rename(elsewhere)
    (folder / name).symlink_to(elsewhere)
    before = elsewhere.read_bytes()
    with pytest.raises(ValueError, match="must be a regular file"):
        CheckpointBank(folder)
    assert elsewhere.read_bytes() == before


# ------------------------------------------------------------ before anything is copied


HALF = {"dtype": torch.float16}
ONWARD = {
    "absorb": lambda bank, new: CheckpointBank(new).absorb(bank),
    "absorb, stored otherwise": lambda bank, new: CheckpointBank(new, **HALF).absorb(bank),
    "export_files": export_files,
    "layer": lambda bank, new: [bank.layer(name) for name in bank.names],
    "read": lambda bank, new: [bank.read(n, slice(3, 4), slice(0, 1)) for n in bank.names],
    "blocks": lambda bank, new: list(bank.blocks(1)),
    "bank --export": lambda bank, new: main(["bank", str(bank.path), "--export", str(new)]),
}


@pytest.mark.parametrize("name", ONWARD)
def test_a_damaged_file_goes_nowhere(name, tmp_path, capsys):
    with CheckpointBank(tmp_path / "bank") as bank:
        for seed in range(2):
            bank.extend(networks(2, seed))
    ONWARD[name](CheckpointBank(tmp_path / "bank", "r"), tmp_path / "before")  # the control
    file = tmp_path / "bank" / "networks.bin"
    content = file.read_bytes()  # every tensor of the last network is damaged
    file.write_bytes(content[:-56] + bytes(byte ^ 1 for byte in content[-56:]))
    with pytest.raises((ValueError, SystemExit)) as told:
        ONWARD[name](CheckpointBank(tmp_path / "bank", "r"), tmp_path / "new")
    message = str(told.value) if told.type is ValueError else capsys.readouterr().err
    assert re.search(r"networks.bin is corrupt: the checksum of .* does not match", message)


def test_a_manifest_that_another_process_has_changed_is_not_cut(tmp_path):
    """Where disks have no locks."""
    with CheckpointBank(tmp_path) as bank:
        bank.extend(networks(2))
        manifest = tmp_path / "manifest.jsonl"
        manifest.write_bytes(manifest.read_bytes() + b"{}\n")
        before = contents(tmp_path)
        with pytest.raises(ValueError, match="has been changed by another process"):
            bank.extend(networks(2))
    assert contents(tmp_path) == before

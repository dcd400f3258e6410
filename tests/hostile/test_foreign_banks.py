"""Banks of another format, and whose names and links lead elsewhere: refused, and untouched."""

import os
import shutil

import pytest
from small_banks import contents, networks, restore, signed, small_bank, unsigned

from lightning_bnn.bank import CheckpointBank

pytestmark = pytest.mark.bad_input


@pytest.mark.parametrize("version", [0, 1, 99])
@pytest.mark.parametrize("mode", ["a", "r"])
def test_another_format_is_refused(version, mode, tmp_path):
    small_bank(tmp_path)
    files = contents(tmp_path)
    lines = unsigned(files["manifest.jsonl"])
    lines[0]["bank"] = version
    restore(tmp_path, {**files, "manifest.jsonl": signed(lines)})
    with pytest.raises(ValueError, match=f"has format {version}, and this version"):
        CheckpointBank(tmp_path, mode)


def outside(tmp_path, name):
    """A bank whose manifest names a file elsewhere, and merges and forgets it."""
    bank, victim = tmp_path / "bank", tmp_path / "victim.safetensors"
    with CheckpointBank(bank) as held:
        held.extend(networks(2))
    (shard,) = bank.glob("shard-*")
    shutil.copy(shard, victim)
    manifest = bank / "manifest.jsonl"
    lines = unsigned(manifest.read_bytes())
    lines[1]["shard"] = name.format(victim=victim)
    manifest.write_bytes(signed([*lines, {"truncate": 0}]))
    return bank, victim


@pytest.mark.parametrize(
    "name", ["../victim.safetensors", "{victim}", "x/../../victim.safetensors", "shard-1\n", ""]
)
@pytest.mark.parametrize("mode", ["a", "r"])
def test_no_name_leads_out_of_the_folder(name, mode, tmp_path):
    bank, victim = outside(tmp_path, name)
    before = victim.read_bytes()
    with pytest.raises(ValueError, match="Line 2 .*'shard' cannot be"):
        CheckpointBank(bank, mode)
    assert victim.read_bytes() == before


@pytest.mark.parametrize("linked", ["shard", "manifest", "lock"])
def test_links_are_not_followed(linked, tmp_path):
    """Neither written to nor absorbed."""
    with CheckpointBank(tmp_path / "bank") as bank:
        bank.extend(networks(2))
    (shard,) = (tmp_path / "bank").glob("shard-*")
    files = {"manifest": "manifest.jsonl", "lock": ".lock", "shard": shard.name}
    path, elsewhere = tmp_path / "bank" / files[linked], tmp_path / "elsewhere"
    os.replace(path, elsewhere)
    path.symlink_to(elsewhere)
    before = elsewhere.read_bytes()
    with pytest.raises(ValueError, match="must be a file of its own"):
        CheckpointBank(tmp_path / "bank")
    assert elsewhere.read_bytes() == before

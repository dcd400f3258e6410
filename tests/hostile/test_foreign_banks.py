"""Banks of another format, and whose names and links lead elsewhere: refused, and untouched."""

import os

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
    with pytest.raises(ValueError, match=f"has format {version}, this version"):
        CheckpointBank(tmp_path, mode)


@pytest.mark.parametrize("linked", ["networks", "manifest", "lock"])
def test_links_are_not_followed(linked, tmp_path):
    """Neither written to nor absorbed."""
    with CheckpointBank(tmp_path / "bank") as bank:
        bank.extend(networks(2))
    files = {"manifest": "manifest.jsonl", "lock": ".lock", "networks": "networks.bin"}
    path, elsewhere = tmp_path / "bank" / files[linked], tmp_path / "elsewhere"
    os.replace(path, elsewhere)
    path.symlink_to(elsewhere)
    before = elsewhere.read_bytes()
    with pytest.raises(ValueError, match="must be a file of its own"):
        CheckpointBank(tmp_path / "bank")
    assert elsewhere.read_bytes() == before

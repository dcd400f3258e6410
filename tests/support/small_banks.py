"""A small bank with every kind of entry, its bytes, and what may become of them."""

import json
import re
import shutil
import zlib

import torch

from lightning_bnn.bank import CheckpointBank

__all__ = [
    "contents", "networks", "refused_or_read", "restore", "small_bank",
    "signed", "unsigned",
]  # fmt: skip


def networks(count, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(count, 2, 3, generator=g),
        "v": torch.randn(count, 2, 3, generator=g),
        "count": torch.arange(count),
    }


def small_bank(folder):
    """Fill a bank; return its networks before and after the last entry."""
    stack, states = networks(9), []
    with CheckpointBank(folder) as bank:
        for row in range(7):
            bank.append({n: t[row] for n, t in stack.items()}, step=row)
            if row == 4:
                bank.truncate(4)
        for row in (7, 8):
            states.append((bank[:], list(bank.records)))
            bank.append({n: t[row] for n, t in stack.items()}, step=row)
        states.append((bank[:], list(bank.records)))
    return states[-2:]


def contents(folder):
    """The bytes of all files but the lock; those that were set aside are among them."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {path.name: path.read_bytes() for path in files}


def restore(folder, files):
    shutil.rmtree(folder)
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)


def unsigned(manifest):
    """The lines of a manifest without their CRC."""
    lines = [json.loads(line) for line in manifest.splitlines()]
    for line in lines:
        line.pop("check")
    return lines


def signed(lines):
    """A manifest of any lines whose CRCs are right, as somebody could make who knows how."""
    content = b""
    for number, line in enumerate(lines):
        body = json.dumps(line, separators=(",", ":")).encode()
        check = zlib.crc32(body, number)
        content += body[:-1] + f',"check":"{check:08x}"}}\n'.encode()
    return content


def refused_or_read(folder, states, log):
    """Open a damaged bank for reading and for appending: it is one of its states, or refused.

    A refusal is one sentence that names the folder, and the networks are not touched. A torn last
    entry may be dropped, with a warning.
    """
    before = contents(folder)
    file = {"networks.bin": before["networks.bin"]}
    for mode in ("r", "a"):
        log.clear()
        networks, message = _opened(folder, mode)
        if networks is None:
            assert re.fullmatch(rf".*{re.escape(str(folder))}.*\.", message), message  # one line
        else:
            fitting = [_same(networks, state) for state in states]
            assert any(fitting), f"{len(networks[1])} networks in mode {mode}"
            assert fitting[-1] or "in the middle of an entry" in log.text
        assert contents(folder).items() >= file.items()
        if mode == "r":
            assert contents(folder) == before


def _opened(folder, mode):
    try:
        with CheckpointBank(folder, mode) as bank:
            return (bank[:], bank.records), ""
    except (ValueError, FileNotFoundError) as error:
        return None, str(error)


def _same(networks, state):
    (stack, records), (expected, expected_records) = networks, state
    return (
        records == expected_records
        and stack.keys() == expected.keys()
        and all(torch.equal(stack[name], tensor) for name, tensor in expected.items())
    )

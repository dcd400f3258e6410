"""A bank gives back what it was given, in every order of writing, crashing and reading."""

import contextlib
import errno
import fcntl
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_bnn import metrics, models
from lightning_bnn.bank import CheckpointBank
from lightning_bnn.bank import rows as rows_of_bytes
from weightsym import params as P
from weightsym.files import read_state, save_tensors


def networks(n, seed=0):
    """A stack with float weights, a BatchNorm and its integer counter."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    torch.manual_seed(seed)
    return {
        k: torch.randn(n, *t.shape) if t.is_floating_point() else torch.arange(n)
        for k, t in P.of(net).items()
    }


def same(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def rounded(stack, dtype):
    """Weights as they come back from a bank of another type; buffers as they are."""
    return {
        k: v.to(dtype).to(v.dtype) if dtype and P.is_weight(k, v) else v for k, v in stack.items()
    }


def rows(stack, index):
    return {k: v[index] for k, v in stack.items()}


@pytest.mark.parametrize("sizes", [(5,), (2, 1, 4), (1,) * 70, (3,) * 40])
def test_gives_back_what_it_was_given(tmp_path, sizes):
    stack = networks(sum(sizes))
    bank, start = CheckpointBank(tmp_path), 0
    for size in sizes:
        part = rows(stack, slice(start, start + size))
        records = [{"step": start + k, "metrics": {"loss": 0.5}} for k in range(size)]
        if size == 1:
            bank.append(rows(part, 0), **records[0])
        else:
            bank.extend(part, records)
        start += size
    bank[0]["0.weight"].zero_()  # changes in place leave the bank alone
    bank[:]["0.weight"].zero_()
    assert bank.shapes.keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert "1.running_mean" in bank.names
    for each in (bank, CheckpointBank(tmp_path, "r")):
        assert len(each) == sum(sizes)
        assert [r["step"] for r in each.records] == list(range(sum(sizes)))
        same(each[:], stack)
        for index in (slice(1, 3), -1, [2, 0], slice(None, None, 2)):
            same(each[index], rows(stack, index))
        same(P.stack(list(each)), stack)
        same(P.stack([n for b in each.blocks(300) for n in P.unstack(b)]), stack)
        found = each.read("0.weight", slice(1, 3), slice(4, 9))
        torch.testing.assert_close(found, stack["0.weight"].flatten(1)[1:3, 4:9])
        each.verify()
    assert bank.layer("0.weight").data_ptr() == bank.layer("0.weight").data_ptr()  # mapped
    own = CheckpointBank(tmp_path / "own", weights=["0.weight"])
    own.extend(stack)
    assert CheckpointBank(tmp_path / "own", "r").shapes.keys() == {"0.weight"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stored_in_half(tmp_path, dtype):
    stack, full = networks(400), CheckpointBank(tmp_path / "full")
    full.extend(stack)
    half = CheckpointBank(tmp_path / "half", dtype=dtype)
    half.extend(stack)
    for each in (half, CheckpointBank(tmp_path / "half", "r")):
        same(each[:], rounded(stack, dtype))
        assert each.read("0.weight", slice(0, 2), slice(0, 3)).dtype == dtype
    assert half.nbytes < 0.7 * full.nbytes


@pytest.mark.parametrize("kept", [0, 1, 4, 6, 7])
def test_truncate(tmp_path, kept):
    stack, bank = networks(10), CheckpointBank(tmp_path)
    for part in (slice(0, 4), slice(4, 7), slice(7, 10)):
        if part.start == 7:
            bank.truncate(kept)
        bank.extend(rows(stack, part))
    expected = rows(stack, [*range(kept), 7, 8, 9])
    same(bank[:], expected)
    bank.close()
    same(CheckpointBank(tmp_path)[:], expected)


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_absorb(tmp_path, dtype):
    stacks = [networks(3, 1), networks(4, 2)]
    target = CheckpointBank(tmp_path / "all", dtype=dtype)
    for k, stack in enumerate(stacks):
        part = CheckpointBank(tmp_path / str(k))
        part.extend(stack, [{"member": k}] * len(stack["0.bias"]))
        part.truncate(3)
        target.absorb(part)
    whole = {k: torch.cat([s[k][:3] for s in stacks]) for k in stacks[0]}
    same(target[:], rounded(whole, dtype))
    assert [r["member"] for r in target.records] == [0, 0, 0, 1, 1, 1]
    target.verify()


def test_a_reader_sees_what_is_appended(tmp_path):
    stack, bank = networks(40), CheckpointBank(tmp_path)
    for row in range(40):
        bank.append(rows(stack, row))
        if row == 0:
            reader = CheckpointBank(tmp_path, "r")
    same(reader[0], rows(stack, 0))
    reader.reload()
    same(reader[:], stack)


def test_a_source_for_mmd(tmp_path):
    net = models.mlp(4, [6, 5], 3)
    x, y = P.populate(net, 30), P.populate(net, 12)
    bank = CheckpointBank(tmp_path)
    bank.extend(x)
    for memory in ({}, {"memory": 4000}):
        torch.testing.assert_close(metrics.mmd(bank, y, **memory), metrics.mmd(x, y))


READS = {
    "a row": lambda bank: bank[4],
    "a slice": lambda bank: bank[2:5],
    "some rows": lambda bank: bank[[0, 4]],
    "all": lambda bank: bank[:],
    "blocks": lambda bank: list(bank.blocks(1)),
    "a layer": lambda bank: bank.layer("0.weight"),
    "features": lambda bank: bank.read("0.weight", slice(3, 5), slice(0, 2)),
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("again", [0, 1, 4])
def test_a_reader_never_sees_other_networks_under_its_records(name, again, tmp_path):
    """A resumed run drops networks and writes others in their place, which a reader has mapped."""
    read, stack, others = READS[name], networks(6), networks(6, 1)
    with CheckpointBank(tmp_path) as bank:
        bank.extend(rows(stack, slice(0, 5)))
    reader, earlier = CheckpointBank(tmp_path, "r"), CheckpointBank(tmp_path, "r")
    before = read(reader)
    earlier.verify()
    with CheckpointBank(tmp_path) as bank:
        bank.append(rows(stack, 5))
        same(read(reader), before)  # the control: rows that are appended change nothing
        bank.truncate(3)
        for row in range(again):
            bank.append(rows(others, row))
    with pytest.raises(ValueError, match=r"the networks of .* after the first 3: .* `reload`"):
        read(reader)
    same(earlier[:3], rows(stack, slice(0, 3)))
    reader.reload()
    assert len(reader) == 3 + again
    same(reader[3:], rows(others, slice(0, again)))


@pytest.mark.parametrize("other", ["another bank", "nothing"])
def test_a_reader_of_a_bank_that_was_exchanged_says_so(other, tmp_path):
    with CheckpointBank(tmp_path / "it") as bank:
        bank.extend(networks(4))
    reader = CheckpointBank(tmp_path / "it", "r")
    reader.verify()
    (tmp_path / "it").rename(tmp_path / "old")
    if other == "another bank":
        with CheckpointBank(tmp_path / "it") as bank:
            bank.extend(networks(9, 1), [{"a": "longer record"}] * 9)
    with pytest.raises(ValueError, match="removed the networks of .*it after the first 0"):
        reader[0]


# ------------------------------------------------------------ types and sizes
TYPES = sorted({t for t in vars(torch).values() if isinstance(t, torch.dtype)}, key=str)


def of_type(dtype):
    """Numbers of a type that each type has, or None for those that torch cannot convert."""
    try:
        return torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]]).to(dtype)
    except RuntimeError:
        return None


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_type_comes_back_or_is_refused(dtype, tmp_path):
    """As the type of networks, and as the type in which weights are stored."""
    own = of_type(dtype)
    if own is not None:
        with CheckpointBank(tmp_path / "own") as bank:
            bank.extend({"w": own, "v": own.double() if dtype.is_floating_point else own})
            found = CheckpointBank(bank.path, "r")[:]
        assert found["w"].dtype == dtype
        assert torch.equal(found["w"].to(torch.complex64), own.to(torch.complex64))
    weights = torch.tensor([[1.0, -1.0, 1.5]])
    state = {"w": weights, "phase": weights * 1j, "count": torch.tensor([[3, -2, 1]])}
    options = {"dtype": dtype, "weights": list(state)}
    if own is None or not dtype.is_floating_point or torch.finfo(dtype).min > -2:
        with pytest.raises(ValueError, match="`dtype` must be a floating type"):
            CheckpointBank(tmp_path / "as", **options)
        return
    bank = CheckpointBank(tmp_path / "as", **options)
    bank.extend(state)
    same(CheckpointBank(bank.path, "r")[:], state)
    if torch.finfo(dtype).max < 1e30:
        with pytest.raises(ValueError, match="`w` is too large for"):
            bank.extend({**state, "w": weights * 1e35})
        same(bank[:], state)


def test_tensors_that_torch_computes_when_they_are_read(tmp_path):
    """Conjugates, negatives, copies of one number, and tensors without any."""
    numbers = torch.randn(3, 2, dtype=torch.complex64)
    stack = {
        "conjugate": numbers.conj(),
        "negative": numbers.conj().imag,
        "expanded": torch.ones(3, 1).expand(3, 5),
        "turned": torch.randn(4, 3).T,
        "empty": torch.ones(3, 0, 2),
    }
    bank = CheckpointBank(tmp_path)
    bank.extend(stack)
    same(CheckpointBank(tmp_path, "r")[:], stack)
    save_tensors(tmp_path / "it.safetensors", stack)
    same(read_state(tmp_path / "it.safetensors")[0], stack)


@pytest.mark.parametrize("size", [5, 300, 2**12 + 3])
def test_any_memory_gives_the_same_bank(size, tmp_path, monkeypatch):
    """Rows of 148 bytes, written and checked in blocks, in pieces of one row, or at once."""
    stack = networks(7)
    plain = CheckpointBank(tmp_path / "plain")
    plain.extend(stack)
    monkeypatch.setattr(rows_of_bytes, "_PIECE", size)
    bank = CheckpointBank(tmp_path / "small")
    for part in (slice(0, 6), slice(6, 7)):
        bank.extend(rows(stack, part))
    for each in (bank, CheckpointBank(bank.path, "r")):
        same(each[:], stack)
        each.verify()
    files = [(path / "networks.bin").read_bytes() for path in (plain.path, bank.path)]
    assert files[0] == files[1]
    bank.truncate(2)
    bank.extend(rows(stack, slice(2, 7)))
    same(CheckpointBank(bank.path, "r")[:], stack)


def test_what_is_read_is_checked_and_nothing_else(tmp_path, monkeypatch):
    """Ten numbers of a stack that was written at once are those of one block."""
    monkeypatch.setattr(rows_of_bytes, "_PIECE", 2000)
    with CheckpointBank(tmp_path) as bank:
        bank.extend({"w": torch.randn(50, 100)})
    file = tmp_path / "networks.bin"
    content = bytearray(file.read_bytes())
    content[20 * 400] ^= 1
    file.write_bytes(content)
    reader = CheckpointBank(tmp_path, "r")
    for row in (0, 14, 25, 49):
        reader.read("w", slice(row, row + 1), slice(0, 10))
    for read in (lambda: reader[20], lambda: reader[:], reader.verify):
        with pytest.raises(ValueError, match="the checksum of 'w' in the networks 20 to 24"):
            read()


@pytest.mark.e2e
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_an_append_takes_the_memory_of_a_tensor(dtype, tmp_path):
    """Of ten tensors of 20 MB, and so does reading a few numbers of each."""
    network = {f"{k}.weight": torch.randn(5_000_000) for k in range(10)}
    bank = CheckpointBank(tmp_path, dtype=dtype)
    bank.append({name: t[:1] for name, t in network.items()})  # what is loaded when it is used
    bank = CheckpointBank(tmp_path / "large", dtype=dtype)
    assert growth(lambda: bank.append(network)) < 90e6
    assert growth(lambda: P.stack([network])) > 150e6  # the control
    assert len(bank) == 1


def growth(work):
    """How much more memory a process has at most while it works."""
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    work()
    return peak() - before


def peak():
    line = next(li for li in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in li)
    return 1024 * int(line.split()[1])


# ------------------------------------------------------------ crashes
def test_a_torn_end_is_dropped_with_one_warning(tmp_path, caplog):
    stack, manifest = networks(3), tmp_path / "manifest.jsonl"
    with CheckpointBank(tmp_path) as bank:
        for row in range(3):
            bank.append(rows(stack, row))
    intact = manifest.read_bytes()
    second = intact[: intact[:-1].rfind(b"\n") + 1]
    for torn in (intact[:-1], second + b"\0" * 40, second + b"\0" * 40 + b"\n", intact[:-7]):
        manifest.write_bytes(torn)
        caplog.clear()
        same(CheckpointBank(tmp_path, "r")[:], rows(stack, slice(0, 2)))
        assert caplog.text.count("in the middle of an entry") == 1
        assert manifest.read_bytes() == torn  # a reader changes nothing
        with CheckpointBank(tmp_path) as bank:
            bank.append(rows(stack, 2))
            same(bank[:], stack)
        same(CheckpointBank(tmp_path, "r")[:], stack)  # no rest of the torn entry is before it
        assert manifest.read_bytes() == intact


def write_for_ever(path):
    """Append networks in a child process: its number, and a file of the rows that are written."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            bank = CheckpointBank(path)
            for row in range(len(bank), 10**6):
                bank.append({"w": torch.full((50,), float(row))}, step=row)
                os.write(write, f"{row}\n".encode())
        os._exit(1)
    os.close(write)
    return child, os.fdopen(read)


def test_killed_at_any_moment(tmp_path):
    """What was reported as written is there, in order, once; twelve times in one bank.

    Opened at any moment before, a bank is whole, too.
    """
    dice = random.Random(0)
    for _ in range(12):
        child, lines = write_for_ever(tmp_path / "bank")
        with lines:
            reported, until = int(next(lines)), time.monotonic() + dice.random() * 0.05
            while time.monotonic() < until:
                first = CheckpointBank(tmp_path / "bank", "r").layer("w")[:, 0]
                torch.testing.assert_close(first, torch.arange(len(first)).float())
            os.kill(child, signal.SIGKILL)
            reported = [reported, *(int(line) for line in lines if line.endswith("\n"))][-1]
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        bank = CheckpointBank(tmp_path / "bank", "r")
        assert len(bank) > reported
        assert [r["step"] for r in bank.records] == list(range(len(bank)))
        torch.testing.assert_close(bank.layer("w")[:, 0], torch.arange(len(bank)).float())
    CheckpointBank(tmp_path / "bank").verify()


def test_files_without_a_manifest_are_not_touched(tmp_path):
    bank = CheckpointBank(tmp_path)
    bank.extend(networks(3))
    bank.close()
    (tmp_path / "manifest.jsonl").rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"no manifest.jsonl among the files"):
        CheckpointBank(tmp_path)
    (tmp_path / "elsewhere").rename(tmp_path / "manifest.jsonl")
    assert len(CheckpointBank(tmp_path)) == 3


def test_children_do_not_keep_the_lock_which_is_of_one_writer(tmp_path):
    bank = CheckpointBank(tmp_path)
    bank.extend(networks(2))
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.write(write, b"x")
        time.sleep(30)
        os._exit(0)
    try:
        with pytest.raises(ValueError, match="open for appending in another process"):
            CheckpointBank(tmp_path)
        assert os.read(read, 1) == b"x"  # the child has begun
        bank.close()
        with CheckpointBank(tmp_path) as second:
            second.extend(networks(2))
            assert len(CheckpointBank(tmp_path, "r")) == 4
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_disks_without_locks(tmp_path, monkeypatch):
    """Some shared disks have none; that is no other writer."""

    def unsupported(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    CheckpointBank(tmp_path).extend(networks(2))
    assert len(CheckpointBank(tmp_path)) == 2


# ------------------------------------------------------------ mistakes


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda b: CheckpointBank(b.path, "w"), "`mode` must be 'a' or 'r', got 'w'"),
        (lambda b: CheckpointBank(b.path / "no", "r"), "There is no bank at"),
        (lambda b: CheckpointBank(b.path / "networks.bin", "r"), "There is no bank at"),
        (
            lambda b: CheckpointBank(b.path / "networks.bin"),
            "networks.bin is a file, not the folder",
        ),
        (lambda b: CheckpointBank(b.path / ".lock" / "a"), "lock is a file, not the folder"),
        (lambda b: b.append({"w": torch.zeros(2)}), "networks of another architecture"),
        (lambda b: b.extend({k: v[..., None] for k, v in networks(2).items()}), "in the bank"),
        (lambda b: b.extend(networks(2), [{}]), "`records` must have one entry per network"),
        (lambda b: b.append(torch.nn.Linear(1, 1)), "`network` must be a dict .*, got a Linear"),
        (lambda b: b.extend([networks(1)]), "`networks` must be a dict .*, got a list"),
        (lambda b: b.truncate(9), "`rows` must be in 0..3, got 9"),
        (lambda b: b.layer("x"), "has no tensor 'x'"),
        (lambda b: b.absorb(b), "`other` is this bank"),
        (lambda b: CheckpointBank(b.path, "r").append({}), "open for reading only"),
        (lambda b: b.layer("0.bias", slice(0, 3, 2)), "`rows` must be a slice without a step"),
        (lambda b: b.extend({k: v.double() for k, v in networks(1).items()}), "the bank stores"),
        (lambda b: b.extend(networks(1), [{"x": torch.ones(1)}]), "`records` must be plain JSON"),
        (lambda b: CheckpointBank(b.path, "r", dtype=torch.float16), "torch.float16 was requested"),
    ],
)
def test_errors(tmp_path, call, message):
    bank = CheckpointBank(tmp_path)
    bank.extend(networks(3))
    with pytest.raises(ValueError, match=message):
        call(bank)


def test_weights_too_large_for_float16(tmp_path):
    bank = CheckpointBank(tmp_path, dtype=torch.float16)
    bank.append({"w": torch.ones(2), "bn.running_var": torch.full((2,), 1e6)})
    assert bank[0]["bn.running_var"][0] == 1e6
    with pytest.raises(ValueError, match=r"`w` is too large for torch.float16"):
        bank.append({"w": torch.full((2,), 1e6), "bn.running_var": torch.ones(2)})


def test_odd_indices_and_tensors(tmp_path):
    stack, shared = networks(4), torch.randn(3)
    bank = CheckpointBank(tmp_path)
    bank.extend(stack)
    same(bank[torch.tensor(2)], rows(stack, 2))
    mask = [True, False, False, True]
    for convert in (list, np.array, torch.tensor, lambda values: list(torch.tensor(values))):
        same(bank[convert(mask)], rows(stack, mask))
        same(bank[convert([2, 0, -1])], rows(stack, [2, 0, -1]))
    same(bank[np.int64(3)], rows(stack, 3))
    assert bank[[]]["0.weight"].shape == (0, 4, 3)
    with pytest.raises(IndexError, match="has 4 networks: .* got .True, False"):
        bank[[True, False]]
    other = CheckpointBank(tmp_path / "other")
    odd = {"a": shared, "b": shared, "scalar": torch.tensor(2.0), "on": torch.tensor(True)}
    other.append(odd)
    same(other[0], odd)
    assert other.read("scalar", slice(0, 1), slice(0, 1)).tolist() == [[2.0]]


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "odd", [True, torch.tensor(True), "0.bias", 1.5, [0.0, 1.0], [[0], [1]], [[0], [1, 2]], None, 3]
)
def test_odd_rows_are_refused(tmp_path, odd):
    bank = CheckpointBank(tmp_path)
    bank.extend(networks(3))
    which = "has 3 networks: .* got 3" if odd == 3 else "must be a number, numbers, a slice or one"
    with pytest.raises(IndexError, match=which):
        bank[odd]

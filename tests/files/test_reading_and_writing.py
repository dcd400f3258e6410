"""Tensors of networks in files are what the library reads; what is written, it reads back."""

import errno
import json
import os
import shutil
import struct
import weakref

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from weightsym.files import open_network, write_like, write_whole
from weightsym.networks.files import safetensors_format
from weightsym.networks.files.writing import check_target

TYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.complex64,
]  # fmt: skip
META = {"format": "pt", "who": "Ada – λ"}


def every_type():
    generator = torch.Generator().manual_seed(0)
    bits = {
        str(t): torch.randint(0, 2, (3, 2), generator=generator).to(t)
        for t in TYPES
        if t != torch.float8_e4m3fn
    }
    eight = torch.randn(5, generator=generator).to(torch.float8_e4m3fn)
    return {**bits, "eight": eight, "empty": torch.zeros(0, 3), "one": torch.tensor(2.5)}


def same(a, b):
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        other = b[name]
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape)
        bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (tensor, other)]
        assert torch.equal(*bits), name


@pytest.fixture
def folder(tmp_path):
    """A folder of Hugging Face in two shards, with a tokenizer and weights in another format."""
    root = tmp_path / "net"
    root.mkdir()
    (root / "config.json").write_text('{"model_type": "none"}')
    (root / "tokenizer.json").write_text("{}")
    (root / "pytorch_model.bin").write_bytes(b"stale")
    (root / ".secret").write_text("hidden")
    shards = {"model-1.safetensors": ["a", "b"], "model-2.safetensors": ["c"]}
    for shard, names in shards.items():
        save_file({n: torch.full((2, 3), float(ord(n))) for n in names}, root / shard, META)
    table = {name: shard for shard, names in shards.items() for name in names}
    index(root, table)
    return root


def index(root, table):
    whole = {"metadata": {"total_size": 72}, "weight_map": table}
    text = table if isinstance(table, str) else json.dumps(whole)
    (root / "model.safetensors.index.json").write_text(text)


# ------------------------------------------------------------ right
def test_every_type_is_read_and_written_as_it_is(tmp_path):
    state = every_type()
    save_file(state, tmp_path / "a.safetensors", META)
    network = open_network(tmp_path / "a.safetensors")
    same({name: network.read(name) for name in network.tensors}, state)
    write_like(network, tmp_path / "b.safetensors", network.read)
    same(load_file(tmp_path / "b.safetensors"), state)
    with safe_open(tmp_path / "b.safetensors", "pt") as file:
        assert file.metadata() == META
    assert (tmp_path / "a.safetensors").stat().st_size == network.nbytes + header(tmp_path / "a")
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "b.safetensors"]


def header(path):
    return 8 + struct.unpack("<Q", path.with_suffix(".safetensors").read_bytes()[:8])[0]


def test_a_single_number_may_have_any_stride(tmp_path):
    column = torch.arange(44.0).view(2, 22)[1:, 3]
    assert column.stride() == (22,)
    safetensors_format.save_tensors(tmp_path / "it.safetensors", {"w": column})
    assert torch.equal(load_file(tmp_path / "it.safetensors")["w"], torch.tensor([25.0]))


def test_only_one_tensor_is_held_at_a_time(tmp_path):
    """Whoever reads the next one has let go of the last one."""
    save_file({str(k): torch.ones(1000) for k in range(5)}, tmp_path / "a.safetensors")
    network, last = open_network(tmp_path / "a.safetensors"), []

    def value(name):
        assert not any(tensor() is not None for tensor in last)
        tensor = network.read(name)
        last.append(weakref.ref(tensor))
        return tensor

    write_like(network, tmp_path / "b.safetensors", value)
    assert len(load_file(tmp_path / "b.safetensors")) == 5


@pytest.mark.parametrize("old", [False, True])
def test_files_of_torch(old, tmp_path):
    weight = torch.randn(3, 4).to(torch.bfloat16).T  # not contiguous
    state = {"net._orig_mod.w": weight, "net.tied": weight, "n": torch.tensor(3)}
    torch.save({"state_dict": state}, tmp_path / "a.ckpt", _use_new_zipfile_serialization=not old)
    network = open_network(tmp_path / "a.ckpt")
    write_like(network, tmp_path / "b.safetensors", network.read)
    expected = {"net.w": weight, "net.tied": weight, "n": torch.tensor(3)}
    same(load_file(tmp_path / "b.safetensors"), expected)


def test_folders_keep_shards_index_and_tokenizer(folder, tmp_path):
    network = open_network(folder)
    assert sorted(network.tensors) == ["a", "b", "c"]
    write_like(network, tmp_path / "out", lambda name: network.read(name) + 1)
    kept = {"config.json", "tokenizer.json", "model.safetensors.index.json"}
    assert set(os.listdir(tmp_path / "out")) == kept | {
        "model-1.safetensors",
        "model-2.safetensors",
    }
    for name in kept:
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    again = open_network(tmp_path / "out")
    same({n: again.read(n) for n in "abc"}, {n: network.read(n) + 1 for n in "abc"})


def test_the_cache_of_hugging_face_links_to_its_blobs(folder, tmp_path):
    blobs, snapshot = tmp_path / "repo" / "blobs", tmp_path / "repo" / "snapshots" / "1"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in folder.iterdir():
        shutil.copyfile(path, blobs / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    network = open_network(snapshot)
    write_like(network, tmp_path / "out", network.read)
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())


def test_overwriting_replaces_what_is_alike(folder, tmp_path):
    network = open_network(folder)
    for value in (0, 1):
        check_target(tmp_path / "out", network, overwrite=True)
        write_like(network, tmp_path / "out", lambda n, v=value: network.read(n) * v, True)
    assert float(open_network(tmp_path / "out").read("a").sum()) == 6 * ord("a")
    assert sorted(os.listdir(tmp_path)) == ["net", "out"]


# ------------------------------------------------------------ at once or not at all
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_what_fails_leaves_everything_as_it_was(error, folder, tmp_path):
    network = open_network(folder)
    write_like(network, tmp_path / "out", network.read)
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors")
    one = open_network(tmp_path / "a.safetensors")
    write_like(one, tmp_path / "b.safetensors", one.read)
    before = sorted(os.listdir(tmp_path))

    def failing(name):
        if name in ("c", "w"):
            raise error
        return network.read(name) * 0

    for source, target in ((network, "out"), (one, "b.safetensors"), (one, "new.safetensors")):
        with pytest.raises(type(error)):
            write_like(source, tmp_path / target, failing, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == before
    assert float(open_network(tmp_path / "out").read("a").sum()) == 6 * ord("a")
    assert torch.equal(load_file(tmp_path / "b.safetensors")["w"], torch.ones(2))


@pytest.mark.bad_input
def test_a_full_disk_is_noticed_before(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 90, 10))
    with pytest.raises(OSError, match="No space left"):
        check_target(tmp_path / "out", open_network(folder))


TARGETS = [  # of what, where, whether it may replace, and what is said
    ("net", "out.safetensors", False, "must be a folder, as the network is one"),
    ("net", "none/out", False, "there is no folder"),
    ("net", "net", False, "`--overwrite true` replaces it"),
    ("net", "mine", True, "also contains 'thesis.tex'"),
    ("net", "link", True, "of the wrong type"),
    ("a.safetensors", "out.pt", False, "must be a .safetensors file"),
    ("a.safetensors", "mine.safetensors", True, "of the wrong type"),
]


@pytest.mark.bad_input
@pytest.mark.parametrize(("source", "target", "overwrite", "sentence"), TARGETS)
def test_targets_that_are_refused(source, target, overwrite, sentence, folder, tmp_path):
    open_network_of(tmp_path / "a.safetensors")
    (tmp_path / "link").symlink_to(folder)
    for name in ("mine", "mine.safetensors"):
        (tmp_path / name).mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years")
    with pytest.raises(ValueError, match=sentence):
        check_target(tmp_path / target, open_network(tmp_path / source), overwrite=overwrite)


def open_network_of(path):
    save_file({"w": torch.ones(2)}, path)
    return open_network(path)


def test_a_link_is_replaced_and_not_what_it_leads_to(tmp_path):
    one = open_network_of(tmp_path / "a.safetensors")
    (tmp_path / "out.safetensors").symlink_to(tmp_path / "a.safetensors")
    write_like(one, tmp_path / "out.safetensors", lambda name: one.read(name) * 3, overwrite=True)
    assert float(load_file(tmp_path / "a.safetensors")["w"].sum()) == 2
    assert float(load_file(tmp_path / "out.safetensors")["w"].sum()) == 6


# ------------------------------------------------------------ damage
@pytest.mark.bad_input
def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"w": torch.ones(100), "v": torch.ones(3)}, path)
    good = path.read_bytes()
    for bad in (b"", good[:5], good[:40], good[:-1], good + b"x", b"\xff" * 64, good[9:]):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match="not a safetensors file, or is damaged"):
            open_network(path)
    path.write_bytes(good)
    network = open_network(path)
    path.write_bytes(good[:-20])  # while it is read
    with pytest.raises(ValueError, match="not a safetensors file, or is damaged"):
        [network.read(name) for name in network.tensors]


def folder_of(path, *files):
    path.mkdir()
    for name in files:
        (path / name).write_text("{}")


UNREADABLE = {
    "empty.safetensors": (lambda path: save_file({}, path), "contains no tensors"),
    "none.safetensors": (lambda path: None, "There is no file or folder"),
    "a.txt": (lambda path: path.write_text("x"), "must be a folder, or end in one of .ckpt"),
    "a.pt": (lambda path: torch.save({"w": torch.eye(2).to_sparse()}, path), "'w' is sparse"),
    "b.pt": (lambda path: path.write_bytes(b"junk"), "only tensors and plain data are"),
    "folder": (folder_of, "not a Hugging Face folder: it has no config.json"),
    "configured": (
        lambda path: folder_of(path, "config.json"), "neither model.safetensors nor",
    ),
}  # fmt: skip


@pytest.mark.bad_input
@pytest.mark.parametrize("name", UNREADABLE)
def test_what_is_no_network_is_refused(name, tmp_path):
    make, sentence = UNREADABLE[name]
    make(tmp_path / name)
    with pytest.raises(ValueError, match=sentence):
        open_network(tmp_path / name)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "name",
    ["../a.safetensors", "/etc/a.safetensors", "x/a.safetensors", "..\\a.safetensors", "a.bin",
     ".safetensors", 3, None, "", ".."],
)  # fmt: skip
def test_shards_lie_in_the_same_folder(name, folder):
    index(folder, {"a": name})
    with pytest.raises(ValueError, match="shards must be .safetensors files in the same folder"):
        open_network(folder)


ONE, TWO = "model-1.safetensors", "model-2.safetensors"
GOOD = {"a": ONE, "b": ONE, "c": TWO}
DAMAGED = [
    (GOOD | {"d": TWO}, f"'d' of {TWO} is not in {TWO}"),
    ({"a": ONE, "c": TWO}, f"'b' of {ONE} is not in the index"),
    (GOOD | {"c": "model-3.safetensors"}, "lacks model-3.safetensors"),
    *((text, "is damaged") for text in ("", "[]", "{", '{"weight_map": {}}', "[" * 10**5)),
    ('{"weight_map": [1]}', "is damaged"),
]


@pytest.mark.bad_input
@pytest.mark.parametrize(("table", "sentence"), DAMAGED, ids=range(len(DAMAGED)))
def test_damaged_folders_are_refused(table, sentence, folder):
    index(folder, table)
    with pytest.raises(ValueError, match=sentence):
        open_network(folder)


@pytest.mark.bad_input
def test_links_of_shards_do_not_lead_out(folder, tmp_path):
    save_file({"c": torch.ones(1)}, tmp_path / "secret.safetensors")
    (folder / TWO).unlink()
    (folder / TWO).symlink_to(tmp_path / "secret.safetensors")
    with pytest.raises(ValueError, match="outside the folder, and is not read"):
        open_network(folder)


@pytest.mark.bad_input
def test_links_of_other_files_do_not_lead_out_either(folder, tmp_path):
    (tmp_path / "secret").write_text("mine")
    (folder / "vocab.txt").symlink_to(tmp_path / "secret")
    network = open_network(folder)
    with pytest.raises(ValueError, match="outside the folder, and is not read"):
        write_like(network, tmp_path / "out", network.read)
    assert not (tmp_path / "out").exists()


@pytest.mark.bad_input
def test_types_that_torch_lacks_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    save_file({"w": torch.ones(2)}, path)
    monkeypatch.delitem(safetensors_format._TYPES, "F32")
    with pytest.raises(ValueError, match="of type F32, which this package cannot read"):
        open_network(path)


def test_a_long_name_has_room_for_its_draft(tmp_path):
    name = "x" * 250
    for text in ("old", "new"):
        write_whole(tmp_path / name, text)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: "new"}

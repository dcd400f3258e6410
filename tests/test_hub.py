"""Posteriors, banks and references on a Hub: what comes back, and what is refused."""

import hashlib
import json
import pickle
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest
import torch
import yaml
from kills import kills
from posterior_cases import POSTERIORS, dense, draw, gaussian, laplace, same, template

from lightning_bnn.bank import CheckpointBank
from lightning_bnn.hub import from_hub, push_to_hub, write_folder
from lightning_bnn.posteriors import (
    DiagonalGaussian,
    Empirical,
    LaplaceGaussian,
    LowRankGaussian,
    Mixture,
    Posterior,
    Symmetrized,
)
from lightning_bnn.references.shipped import reference_folder
from weightsym import discover
from weightsym import params as P
from weightsym.networks.files.safetensors_format import save_tensors

hub = pytest.importorskip("huggingface_hub")


TENSORS = "tensors-00000.safetensors"


HALF = {"half precision": lambda: DiagonalGaussian(P.of(template().bfloat16()), 0.3)}


@pytest.mark.parametrize("name", [*POSTERIORS, *HALF])
def test_a_saved_posterior_is_the_same_bit_for_bit(name, tmp_path):
    posterior, net = (POSTERIORS | HALF)[name](), template()
    posterior.save(tmp_path / "it")
    files = sorted(path.name for path in (tmp_path / "it").iterdir())
    assert files == ["contents.json", TENSORS]
    found = Posterior.load(tmp_path / "it", net)
    assert repr(found) == repr(posterior)
    assert same(found.state_dict(), posterior.state_dict())
    assert same(draw(found), draw(posterior))
    assert not same(draw(found), draw(posterior, seed=6))
    assert len(found.modes()) == len(posterior.modes())
    if name not in HALF:
        x, seed = torch.randn(5, 3).double(), torch.Generator().manual_seed
        assert torch.equal(*(q.predict(net, x, 6, seed(1)) for q in (found, posterior)))
    if name == "symmetrized":
        assert torch.equal(*(q.log_prob(draw(posterior)) for q in (found, posterior)))
        assert not torch.equal(found.log_prob(draw(found)), found.base.log_prob(draw(found)))


@pytest.mark.bad_input
def test_what_cannot_be_saved_says_what_can(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    posterior = Symmetrized(DiagonalGaussian(P.of(net)), discover(net, torch.randn(4, 2)))
    mine = type("Mine", (DiagonalGaussian,), {})(P.of(net))
    told = "Mine cannot be saved, .* save draws of it"
    for it in (mine, Mixture([mine])):
        with pytest.raises(ValueError, match=told):
            it.save(tmp_path / "it")
    draws = Empirical(posterior.sample(4), [0] * 4)
    draws.save(tmp_path / "it")  # where nothing has been written
    assert same(Posterior.load(tmp_path / "it").networks, draws.networks)
    with pytest.raises(ValueError, match="already holds a posterior or a bank"):
        draws.save(tmp_path / "it")
    with pytest.raises(ValueError, match=r"not of this network: '0.bias' is \(3,\) in it, but \(4"):
        Posterior.load(tmp_path / "it", torch.nn.Sequential(torch.nn.Linear(2, 4)))


# ------------------------------------------------------------ a Hub on this machine
class Hub:
    """The calls of its client that we make, over commits that are dicts of files."""

    def __init__(self, folder):
        self.folder, self.repos, self.tokens = folder, {}, []

    def upload(self, *, repo_id, folder_path, delete_patterns, **_):
        commits = self.repos.setdefault(repo_id, [])
        files = commits[-1] if commits else {".gitattributes": b""}
        deleted = {*hub.utils.filter_repo_objects(files, allow_patterns=delete_patterns)}
        added = {path.name: path.read_bytes() for path in Path(folder_path).iterdir()}
        commits.append({n: c for n, c in files.items() if n not in deleted} | added)
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/{len(commits)}")

    def download(self, repo_id, *, revision, token, allow_patterns, **_):
        hub.utils.validate_repo_id(repo_id)
        self.tokens.append(token)
        files = self.repos[repo_id][int(revision or 0) - 1]
        for name in hub.utils.filter_repo_objects(files, allow_patterns=allow_patterns):
            (self.folder / str(revision) / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / str(revision) / name).write_bytes(files[name])
        return str(self.folder / str(revision))


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A client of huggingface_hub that knows its arguments, with a Hub of this machine."""
    server = Hub(tmp_path / "cache")
    client = create_autospec(hub.HfApi, instance=True)
    client.create_repo.side_effect = lambda name, **_: SimpleNamespace(repo_id=name)
    client.upload_folder.side_effect = server.upload
    monkeypatch.setattr(hub, "HfApi", lambda *, token, **_: server.tokens.append(token) or client)
    download = create_autospec(hub.snapshot_download, side_effect=server.download)
    monkeypatch.setattr(hub, "snapshot_download", download)
    return server


def test_a_posterior_goes_to_a_hub_and_back(server):
    first, second = gaussian(0), laplace()
    url = push_to_hub(first, "me/it", about="Of a toy.", licence="mit", token="hf_t", private=True)
    old = url.rpartition("/")[2]
    push_to_hub(second, "me/it", token="hf_t")
    found = from_hub("me/it", network=template(), token="hf_t")
    assert server.tokens == ["hf_t"] * 3
    assert isinstance(found, LaplaceGaussian)
    assert same(draw(found), draw(second))
    assert same(draw(from_hub("me/it", revision=old)), draw(first))
    files = server.repos["me/it"][0]
    names = [".gitattributes", "README.md", "contents.json", TENSORS]
    assert sorted(files) == names
    _, metadata, text = files["README.md"].decode().split("---\n", 2)
    tags = ["bayesian-neural-networks", "lightning_bnn", "posterior"]
    expected = {"library_name": "lightning_bnn", "tags": tags, "license": "mit"}
    assert yaml.safe_load(metadata) == expected
    assert "# me/it\n\nOf a toy.\n" in text
    assert 'from_hub("me/it"' in text


def test_a_bank_goes_to_a_hub_and_back(server, tmp_path):
    networks = P.populate(template(), 7)
    with CheckpointBank(tmp_path / "here", dtype=torch.float16) as bank:
        bank.extend(networks, [{"step": k, "metrics": {"nll": k / 3}} for k in range(7)])
    push_to_hub(bank, "me/bank", commit_message="More")
    found = from_hub("me/bank", folder=tmp_path / "there")
    assert found.path == tmp_path / "there"
    assert found.records == bank.records
    assert (found.shapes, found.stored_as) == (bank.shapes, torch.float16)
    assert same(found[:], bank[:])
    assert not same(found[:], networks)  # they were rounded
    assert found.nbytes == bank.nbytes
    with CheckpointBank(tmp_path / "there") as more:
        more.append(P.of(template()))


def test_a_large_bank_has_several_files(tmp_path, monkeypatch):
    bank, blocks = CheckpointBank(tmp_path / "here"), CheckpointBank.blocks
    bank.extend(P.populate(template(), 7), [{"step": k} for k in range(7)])
    size = bank.nbytes // len(bank)
    monkeypatch.setattr(CheckpointBank, "blocks", lambda self: blocks(self, 3 * size))
    write_folder(bank, tmp_path / "files")
    assert len(list((tmp_path / "files").glob("*.safetensors"))) == 3
    found = from_hub(tmp_path / "files", folder=tmp_path / "there", network=template())
    assert same(found[:], bank[:])
    assert found.records == bank.records
    with pytest.raises(ValueError, match="not of this network"):
        from_hub(tmp_path / "files", folder=tmp_path / "other", network=torch.nn.Linear(2, 2))
    assert not (tmp_path / "other").exists()


def test_a_reference_goes_to_a_hub_and_back(server, tmp_path):
    push_to_hub("two_gaussians", "me/reference", licence="apache-2.0")
    draws = from_hub("me/reference", folder=tmp_path / "it")
    here = reference_folder("two_gaussians")
    assert same(draws[:], CheckpointBank(here / "bank", "r")[:])
    assert (tmp_path / "it" / "card.json").read_text() == (here / "card.json").read_text()
    written = yaml.safe_load((tmp_path / "it" / "config.json").read_text())
    assert written == yaml.safe_load((here / "config.yaml").read_text())
    assert sorted(path.name for path in (tmp_path / "it").iterdir()) == [
        "bank", "card.json", "config.json",  # and no config.yaml, which commands would run
    ]  # fmt: skip
    text = server.repos["me/reference"][-1]["README.md"].decode()
    assert "(gold; Apache 2.0, data and draws)" in text


def test_what_a_later_push_no_longer_has_is_deleted(server, tmp_path):
    bank, blocks = CheckpointBank(tmp_path / "here"), CheckpointBank.blocks
    bank.extend(P.populate(template(), 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointBank, "blocks", lambda self: blocks(self, 1))
        push_to_hub(bank, "me/it")
    push_to_hub(gaussian(), "me/it")
    assert [len(files) for files in server.repos["me/it"]] == [7, 4]
    assert same(draw(from_hub("me/it")), draw(gaussian()))


def test_nothing_else_of_a_repository_is_downloaded(server):
    push_to_hub(gaussian(), "me/it")
    evil = {name: b"evil" for name in ("model.pkl", "pytorch_model.bin", "a/contents.json", "x.py")}
    server.repos["me/it"][-1].update({**evil, "../../evil.json": b"{}"})
    from_hub("me/it")
    got = {path.name for path in server.folder.rglob("*") if path.is_file()}
    assert got == {"README.md", "contents.json", TENSORS}
    assert not (server.folder.parent.parent / "evil.json").exists()


def test_a_damaged_file_of_the_cache_is_downloaded_once_more(server, tmp_path):
    """The Hub's client takes what is in its cache for what it has downloaded."""
    push_to_hub(gaussian(), "me/it")
    fresh, cache, calls = server.download, {}, []

    def cached(repo_id, *, force_download=False, **options):
        calls.append(force_download)
        if force_download or repo_id not in cache:
            cache[repo_id] = fresh(repo_id, **options)
        return cache[repo_id]

    hub.snapshot_download.side_effect = cached
    whole = draw(from_hub("me/it"))
    assert calls == [False]  # the control
    for damage in (flip_a_bit, lambda f: (f / "contents.json").write_bytes(b"{")):
        damage(Path(cache["me/it"]))
        assert same(draw(from_hub("me/it")), whole)
        assert calls[-2:] == [False, True]
        assert same(draw(from_hub("me/it")), whole)
        assert calls[-1:] == [False]
    server.repos["me/it"][-1][TENSORS] += b"x"  # damaged on the Hub: it is asked twice, no more
    cache.clear()
    with pytest.raises(ValueError, match=f"{TENSORS} is missing or differs from its hash"):
        from_hub("me/it")
    flip_a_bit(Path(cache["me/it"]))
    hub.snapshot_download.side_effect = lambda repo_id, force_download=False, **_: (
        1 / 0 if force_download else cache[repo_id]  # no network
    )
    with pytest.raises(ValueError, match=f"{TENSORS} is missing or differs from its hash"):
        from_hub("me/it")


def test_numbers_of_records_come_back_as_they_were(tmp_path):
    """Those of a member that has diverged, too."""
    odd = [float("nan"), float("inf"), -float("inf"), 0.1 + 0.2, 2**70, None, True, "x", [1.5], {}]
    bank = CheckpointBank(tmp_path / "here")
    bank.extend(P.populate(template(), 10), [{"metrics": {"loss": value}} for value in odd])
    write_folder(bank, tmp_path / "it")
    found = from_hub(tmp_path / "it", folder=tmp_path / "there")
    assert repr(found.records) == repr(bank.records)


TYPES = sorted({t for t in vars(torch).values() if isinstance(t, torch.dtype)}, key=str)

NO_SAFETENSORS = {
    getattr(torch, name, None)
    for name in ("complex32", "bcomplex32", "complex128", "float8_e8m0fnu", "float8_e4m3fnuz",
                 "float8_e5m2fnuz")
}  # fmt: skip


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_bank_of_every_type_comes_back_or_is_refused_at_once(dtype, tmp_path):
    """As the type of networks, and as the type in which weights are stored."""
    try:
        own = torch.tensor([[1.0, 0.0], [2.0, 4.0]]).to(dtype)
    except RuntimeError:
        return  # there is no such tensor
    bank = CheckpointBank(tmp_path / "here")
    bank.extend({"w": own})
    if dtype in NO_SAFETENSORS:
        with pytest.raises(ValueError, match=f"'w' is {dtype}, which safetensors files do not"):
            write_folder(bank, tmp_path / "it")
        assert not list((tmp_path / "it").iterdir())
    else:
        write_folder(bank, tmp_path / "it")
        found = from_hub(tmp_path / "it", folder=tmp_path / "there")[:]["w"]
        assert (found.dtype, found.tolist()) == (dtype, own.tolist())
    if not dtype.is_floating_point or torch.finfo(dtype).min > -2:
        return
    stored = CheckpointBank(tmp_path / "as", dtype=dtype)
    stored.extend({"w": torch.tensor([[1.0, -1.5]])})
    write_folder(stored, tmp_path / "files")
    found = from_hub(tmp_path / "files", folder=tmp_path / "from files")
    assert (found.stored_as, found[0]["w"].tolist()) == (dtype, [1.0, -1.5])


# ------------------------------------------------------------ killed in the midst
@pytest.mark.e2e
def test_a_save_that_is_killed_can_be_repeated(tmp_path):
    """At any moment there is the whole posterior, or none, and then it can be saved there."""
    posterior, folder = gaussian(), tmp_path / "it"

    def save():
        write_folder(posterior, folder)

    count = 0
    for _ in kills(save, tmp_path, lambda: shutil.rmtree(folder, ignore_errors=True)):
        count += 1
        try:
            found = Posterior.load(folder)
        except ValueError as error:
            assert "There is no contents.json in" in str(error)  # noqa: PT017
            save()
            found = Posterior.load(folder)
        assert same(draw(found), draw(posterior))
        assert (folder / "README.md").is_file()
    assert count > 10


def test_a_save_that_fails_leaves_nothing(tmp_path, monkeypatch):
    first, bad = P.of(template()), P.of(template())
    bad["0.weight"] = bad["0.weight"] * torch.nan
    bank, blocks = CheckpointBank(tmp_path / "here"), CheckpointBank.blocks
    bank.extend(P.stack([first, bad]))
    monkeypatch.setattr(CheckpointBank, "blocks", lambda self: blocks(self, 1))
    (tmp_path / "it").mkdir()
    (tmp_path / "it" / "notes").write_text("mine")
    with pytest.raises(ValueError, match="'0.weight' holds NaN"):
        write_folder(bank, tmp_path / "it")
    assert [path.name for path in (tmp_path / "it").iterdir()] == ["notes"]


def test_networks_of_a_stranger_are_not_removed(tmp_path):
    """What has lost its index may be all that somebody has; a save that was killed left a mark."""
    gaussian().save(tmp_path / "it")
    (tmp_path / "it" / "contents.json").unlink()
    with pytest.raises(ValueError, match="already holds a posterior or a bank"):
        gaussian(1).save(tmp_path / "it")
    assert (tmp_path / "it" / TENSORS).is_file()


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["bank", "reference"])
def test_a_bank_that_is_read_from_the_hub_is_there_as_a_whole(kind, tmp_path, monkeypatch):
    """A process that is killed leaves no shorter bank, and what it leaves is in nobody's way."""
    source = "two_gaussians"
    if kind == "bank":
        source = CheckpointBank(tmp_path / "here")
        source.extend(P.populate(template(), 4), [{"step": k} for k in range(4)])
    write_folder(source, tmp_path / "it")
    there, count = tmp_path / "to" / "there", 0

    def get():
        return from_hub(tmp_path / "it", folder=there)

    expected = get()
    for _ in kills(get, tmp_path / "to", lambda: shutil.rmtree(there, ignore_errors=True)):
        count += 1
        if there.exists():
            found = CheckpointBank(there if kind == "bank" else there / "bank", "r")
        else:
            found = get()
        assert same(found[:], expected[:])
        assert found.records == expected.records
        assert kind == "bank" or (there / "config.json").is_file()
    assert count > 10


# ------------------------------------------------------------ damaged and malicious folders
class Touch:
    def __reduce__(self):
        return Path("run").mkdir, ()


def edited(change):
    """Another index."""

    def damage(folder):
        path = folder / "contents.json"
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return damage


def replaced(write):
    """Other tensors, with their true hash."""

    def damage(folder):
        path = folder / TENSORS
        path.unlink()
        write(path)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        edited(lambda c: c["files"].update({TENSORS: digest}))(folder)

    return damage


def with_values(posterior, name, values):
    """A posterior that was saved with values which its constructor refuses."""

    def damage(folder):
        shutil.rmtree(folder)
        posterior.state_dict()[name].copy_(torch.as_tensor(values))
        posterior.save(folder)

    return damage


def flip_a_bit(folder):
    content = bytearray((folder / TENSORS).read_bytes())
    content[-1] ^= 1
    (folder / TENSORS).write_bytes(content)


def moved(place):
    """A file elsewhere that is what the index says."""

    def damage(folder):
        path = (folder / TENSORS).rename(folder.parent / "out.safetensors")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        edited(lambda c: c.update(files={place(path): digest}))(folder)

    return damage


def of_posterior(**changes):
    return edited(lambda c: c["posterior"].update(changes))


NO_POSTERIOR = "is damaged and does not define a posterior"
DAMAGES = {
    "a bit": (flip_a_bit, f"{TENSORS} is missing or differs from its hash: download"),
    "no file": (lambda f: (f / TENSORS).unlink(), f"{TENSORS} is missing or differs from its hash"),
    "no hash": (edited(lambda c: c["files"].update({TENSORS: None})), "is missing or differs"),
    "a pickle": (
        replaced(lambda path: path.write_bytes(pickle.dumps(Touch()))),
        "is not a safetensors file, or is damaged",
    ),
    "NaN": (
        replaced(lambda path: save_tensors(path, {"mean": torch.tensor([0.0, torch.nan])})),
        "'mean' holds NaN",
    ),
    "weights": (
        with_values(Mixture([gaussian(), gaussian(1)]), "weights", [10.0, 20.0]),
        "does not define a posterior: the weights of a mixture do not sum to 1.",
    ),
    "log_std": (with_values(gaussian(), "log_std", -torch.inf), "deviations are not positive and"),
    "std": (
        with_values(LowRankGaussian.fit(P.populate(template(), 9)), "std", -1.0),
        "does not define a posterior: `std` must be finite and not negative.",
    ),
    "curvature": (
        with_values(dense(), "curvature.0.values", -1.0),
        "precisions are not positive and finite",
    ),
    "a file above": (moved(lambda p: f"../{p.name}"), "names files outside the bundle"),
    "an absolute path": (moved(str), "names files outside the bundle"),
    "another format": (edited(lambda c: c.update(format=2)), "has format 2, but this"),
    "another kind": (edited(lambda c: c.update(kind="x")), "holds 'x', which this"),
    "a class": (of_posterior(**{"class": "os.system"}), "'os.system' is not a class of"),
    "no settings": (edited(lambda c: c.update(posterior=None)), NO_POSTERIOR),
    "shapes": (of_posterior(shapes={"w": [10**12]}), NO_POSTERIOR),
    "a long number": (of_posterior(shapes={"w": [10**400]}), NO_POSTERIOR),
    "a long order": (of_posterior(order=[10**400]), NO_POSTERIOR),
    "a long format": (edited(lambda c: c.update(format=10**4000)), "this version reads 1."),
    "negative shapes": (of_posterior(shapes={"w": [-2, -13]}), NO_POSTERIOR),
    "order": (of_posterior(order=["w"]), NO_POSTERIOR),
    "no JSON": (lambda f: (f / "contents.json").write_bytes(b"\x80\x04"), "is damaged"),
    "deep JSON": (lambda f: (f / "contents.json").write_text("[" * 10**5), "must be an object"),
    "nothing": (lambda f: (f / "contents.json").unlink(), "There is no contents.json in"),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_posterior_is_refused_in_one_sentence(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    damage, message = DAMAGES[name]
    gaussian().save("it")
    assert isinstance(from_hub("it"), DiagonalGaussian)
    damage(tmp_path / "it")
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        from_hub("it")
    assert "\n" not in str(caught.value)
    assert not Path("run").exists()


BANKS = {
    "few records": (lambda c: c["records"].pop(), "is damaged and does not define a bank"),
    "many records": (lambda c: c["records"].append({}), "it has 5 records for 4 networks"),
    "records": (lambda c: c.update(records=[1] * 4), "is damaged and does not define a bank"),
    "a type": (lambda c: c.update(stored_as="uint8"), "is damaged and does not define a bank"),
    "order": (lambda c: c["order"].pop(), "`order` does not name each of its tensors once"),
    "repeated": (lambda c: c["order"].append("0.bias"), "`order` does not name each of its tens"),
    "weights": (lambda c: c["weights"].append("x"), "`weights` names 'x', but the networks do"),
    "no weights": (lambda c: c.pop("weights"), "is damaged and does not define a bank"),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("name", BANKS)
def test_a_damaged_bank_is_refused_and_leaves_nothing(name, tmp_path):
    change, message = BANKS[name]
    bank = CheckpointBank(tmp_path / "here")
    bank.extend(P.populate(template(), 4))
    write_folder(bank, tmp_path / "it")
    edited(change)(tmp_path / "it")
    with pytest.raises(ValueError, match=message):
        from_hub(tmp_path / "it", folder=tmp_path / "there")
    assert not (tmp_path / "there").exists()


@pytest.mark.bad_input
def test_draws_that_are_not_those_of_the_card_are_refused(tmp_path):
    write_folder("two_gaussians", tmp_path / "it")
    edited(lambda c: c["card"].update(sha256="0" * 64))(tmp_path / "it")
    with pytest.raises(ValueError, match="its draws do not match its card"):
        from_hub(tmp_path / "it", folder=tmp_path / "there")


REFUSED = {
    "is empty": lambda p: write_folder(CheckpointBank(p / "empty"), p / "other"),
    "`folder` is missing: name a new folder": lambda p: from_hub(p / "it"),
    "here is not empty; name a new": lambda p: from_hub(p / "it", folder=p / "here"),
    "file is not empty; name a new": lambda p: from_hub(p / "it", folder=p / "file"),
    "nowhere is not a folder of a reference": lambda p: write_folder("nowhere", p / "other"),
    "must be a posterior .*, got a None": lambda p: write_folder(None, p / "other"),
    "must be a posterior .*, got a list": lambda p: write_folder([template()], p / "other"),
    "file is not a folder and cannot": lambda p: write_folder(gaussian(), p / "file"),
    "below is not a folder and cannot": lambda p: write_folder(gaussian(), p / "file" / "below"),
    "`repo_id` must be .* got '/no": lambda p: from_hub("/no/such/folder"),
    "`repo_id` must be .* got 'a/b/c/d": lambda p: from_hub("a/b/c/d"),
    "does not hold a posterior, but 'bank'": lambda p: Posterior.load(p / "it", template()),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("message", REFUSED)
def test_arguments_that_do_not_fit(message, tmp_path):
    bank = CheckpointBank(tmp_path / "here")
    bank.append(P.of(template()))
    write_folder(bank, tmp_path / "it")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=message):
        REFUSED[message](tmp_path)

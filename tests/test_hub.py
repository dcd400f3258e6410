"""Posteriors, banks and references on a Hub: what comes back, and what is refused."""

import base64
import hashlib
import json
import pickle
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

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
from lightning_bnn.posteriors.laplace import CurvatureBlock
from lightning_bnn.references.shipped import reference_folder
from weightsym import discover
from weightsym import params as P
from weightsym.files.safetensors_format import save_tensors

hub = pytest.importorskip("huggingface_hub")


def template():
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    return net.eval()


def gaussian(seed=0):
    torch.manual_seed(seed)
    net = P.of(template())
    return DiagonalGaussian(net, {name: 0.1 + t.abs() for name, t in net.items()})


def laplace(structure, **options):
    torch.manual_seed(0)
    net = template()
    sizes = {name: p.shape for name, p in net[2].named_parameters(prefix="2")}
    if structure == "full":
        left = torch.linalg.qr(torch.randn(10, 10))[0]
        blocks = [CurvatureBlock(tuple(sizes), torch.rand(10, 1), left)]
    else:
        turns = [torch.linalg.qr(torch.randn(k, k))[0] for k in (2, 4)]
        blocks = [CurvatureBlock(("2.weight",), torch.rand(2, 4), *turns)]
    return LaplaceGaussian(P.of(net), blocks, 0.1 + 0.2, 1 / 3, **options)


def dense():
    net = template()
    state = SimpleNamespace(params=dict(net.named_parameters()), prec=torch.diag(torch.rand(34)))
    state.prec += torch.ones(34, 34)
    return Posterior.of(state, net)


POSTERIORS = {
    "dense": dense,
    "diagonal": gaussian,
    "some weights": lambda: DiagonalGaussian(P.of(template()), 0.3, ["2.weight", "0.bias"]),
    "half precision": lambda: DiagonalGaussian(P.of(template().bfloat16()), 0.3),
    "low rank": lambda: LowRankGaussian.fit(P.populate(template(), 9), 5, 0.1),
    "kron": lambda: laplace("kron", prediction="network"),
    "full": lambda: laplace("full", last_layer="2"),
    "networks": lambda: Empirical(P.populate(template(), 8), [0, 0, 1, 1, 2, 2, 3, 3]),
    "names of chains": lambda: Empirical(P.populate(template(), 8), [*"aabbccdd"]),
    "tensor of chains": lambda: Empirical(P.populate(template(), 8), torch.arange(8) // 4),
    "mixture": lambda: Mixture([gaussian(k) for k in range(3)], [0.1, 0.2, 0.6]),
    "mixture of mixtures": lambda: Mixture([Mixture([laplace("kron"), gaussian()]), gaussian(7)]),
}
EACH = pytest.mark.parametrize("name", POSTERIORS)


def draw(posterior, seed=5):
    return posterior.sample(6, torch.Generator().manual_seed(seed))


def same(a, b):
    return list(a) == list(b) and all(torch.equal(a[n], b[n]) for n in a)


@EACH
def test_a_saved_posterior_is_the_same_bit_for_bit(name, tmp_path):
    posterior, net = POSTERIORS[name](), template()
    posterior.save(tmp_path / "it")
    files = sorted(path.name for path in (tmp_path / "it").iterdir())
    assert files == ["contents.json", "tensors-00000.safetensors"]
    found = Posterior.load(tmp_path / "it", net)
    assert repr(found) == repr(posterior)
    assert same(found.state_dict(), posterior.state_dict())
    assert same(draw(found), draw(posterior))
    assert not same(draw(found), draw(posterior, 6))
    assert len(found.modes()) == len(posterior.modes())
    if name != "half precision":
        x = torch.randn(5, 3)
        predicted = [
            q.predict(net, x, 6, torch.Generator().manual_seed(1)) for q in (found, posterior)
        ]
        assert torch.equal(*predicted)


@pytest.mark.bad_input
def test_what_cannot_be_saved_says_what_can(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    posterior = Symmetrized(DiagonalGaussian(P.of(net)), discover(net, torch.randn(4, 2)))
    mine = type("Mine", (DiagonalGaussian,), {})(P.of(net))
    for it in (posterior, Mixture([posterior]), mine):
        with pytest.raises(
            ValueError, match="(Symmetrized|Mine) cannot be saved, .* save draws of it"
        ):
            it.save(tmp_path / "it")
    assert not (tmp_path / "it").exists()
    draws = Empirical(posterior.sample(4), [0] * 4)
    draws.save(tmp_path / "it")
    assert same(Posterior.load(tmp_path / "it").networks, draws.networks)
    with pytest.raises(ValueError, match="holds a posterior or a bank already"):
        draws.save(tmp_path / "it")
    with pytest.raises(
        ValueError, match=r"not of this network: '0.bias' is \(3,\) in it, and \(4,\) in"
    ):
        Posterior.load(tmp_path / "it", torch.nn.Sequential(torch.nn.Linear(2, 4)))


# ------------------------------------------------------------ a Hub on this machine
class Hub(BaseHTTPRequestHandler):
    """The few endpoints that the client asks, over commits that are dicts of files."""

    repos: dict
    asked: list

    def log_message(self, *_):
        pass

    def answer(self, content, status=200, **headers):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self):
        path = self.path.partition("?")[0]
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.asked.append((self.command, path, self.headers.get("Authorization")))
        if path == "/api/repos/create":
            entry = json.loads(body)
            name = f"{entry['organization']}/{entry['name']}"
            self.repos.setdefault(name, {"main": [("1" * 40, {".gitattributes": b""})]})
            self.answer({"url": f"{hub.constants.ENDPOINT}/{name}"})
        elif path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            files = json.loads(body)["files"]
            modes = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files
            ]
            self.answer({"files": modes})
        elif match := re.fullmatch("/api/models/(.+)/commit/(.+)", path):
            self.commit(*match.groups(), map(json.loads, body.splitlines()))
        else:
            self.answer({"error": path}, 404)

    def commit(self, name, revision, lines):
        commits = self.repos[name][revision]
        files = dict(commits[-1][1])
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        oid = hashlib.sha1(repr((files, len(commits))).encode()).hexdigest()
        commits.append((oid, files))
        url = f"{hub.constants.ENDPOINT}/{name}/commit/{oid}"
        self.answer({"commitUrl": url, "commitOid": oid, "commitMessage": ""})

    def found(self, name, revision):
        every = [c for commits in self.repos.get(name, {}).values() for c in commits]
        latest = self.repos.get(name, {}).get(revision, [(None, {})])[-1:] or [(None, {})]
        return next((c for c in every if c[0] == revision), latest[0])

    def do_GET(self):
        path = self.path.partition("?")[0]
        self.asked.append((self.command, path, self.headers.get("Authorization")))
        if match := re.fullmatch("/api/models/([^/]+/[^/]+)/revision/(.+)", path):
            oid, files = self.found(*match.groups())
            siblings = [{"rfilename": name} for name in files]
            content = {"id": match[1], "sha": oid, "siblings": siblings, "private": False}
        elif match := re.fullmatch("/api/models/([^/]+/[^/]+)/tree/([^/]+)", path):
            oid, files = self.found(*match.groups())
            content = [
                {"type": "file", "path": n, "size": len(c), "oid": hashlib.sha1(c).hexdigest()}
                for n, c in files.items()
            ]
        elif match := re.fullmatch("/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            oid, files = self.found(match[1], match[2])
            content = files.get(match[3])
            headers = {
                "X_Repo_Commit": oid,
                "ETag": f'"{hashlib.sha1(content or b"").hexdigest()}"',
            }
            if content is not None:
                return self.answer(content, **headers)
            oid = None
        else:
            oid, content = None, {"error": path}
        if oid is None:
            return self.answer({"error": "none"}, 404, X_Error_Code="RepoNotFound")
        return self.answer(content)

    do_HEAD = do_GET


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The client of huggingface_hub, with a Hub of this machine and an empty cache."""
    handler = type("Handler", (Hub,), {"repos": {}, "asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as it:
        url = f"http://127.0.0.1:{it.server_port}"
        monkeypatch.setattr(hub.constants, "ENDPOINT", url)
        template = "/{repo_id}/resolve/{revision}/{filename}"
        for module in (hub.constants, hub.file_download):
            monkeypatch.setattr(
                module, "HUGGINGFACE_CO_URL_TEMPLATE", url + template, raising=False
            )
        monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        threading.Thread(target=it.serve_forever, daemon=True).start()
        yield handler
        it.shutdown()


def test_a_posterior_goes_to_a_hub_and_back(server):
    first, second = gaussian(0), laplace("kron")
    url = push_to_hub(first, "me/it", about="Of a toy.", licence="mit", token="hf_t", private=True)
    old = url.rpartition("/")[2]
    push_to_hub(second, "me/it", token="hf_t")
    assert {token for _, path, token in server.asked if "me/it" in path} == {"Bearer hf_t"}
    found = from_hub("me/it", network=template(), token="hf_t")
    assert isinstance(found, LaplaceGaussian)
    assert same(draw(found), draw(second))
    assert same(draw(from_hub("me/it", revision=old)), draw(first))
    files = server.repos["me/it"]["main"][1][1]
    names = [".gitattributes", "README.md", "contents.json", "tensors-00000.safetensors"]
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
    text = server.repos["me/reference"]["main"][1][1]["README.md"].decode()
    assert "(gold; Apache 2.0, data and draws)" in text


def test_what_a_later_push_no_longer_has_is_deleted(server, tmp_path):
    bank, blocks = CheckpointBank(tmp_path / "here"), CheckpointBank.blocks
    bank.extend(P.populate(template(), 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointBank, "blocks", lambda self: blocks(self, 1))
        push_to_hub(bank, "me/it")
    push_to_hub(gaussian(), "me/it")
    files = [sorted(commit[1]) for commit in server.repos["me/it"]["main"]]
    assert [len(names) for names in files] == [1, 7, 4]
    assert same(draw(from_hub("me/it")), draw(gaussian()))


def test_nothing_else_of_a_repository_is_downloaded(server):
    push_to_hub(gaussian(), "me/it")
    commits = server.repos["me/it"]["main"]
    evil = {name: b"evil" for name in ("model.pkl", "pytorch_model.bin", "a/contents.json", "x.py")}
    commits.append(("0" * 40, {**commits[-1][1], **evil, "../../evil.json": b"{}"}))
    from_hub("me/it")
    got = {path.rpartition("/")[2] for method, path, _ in server.asked if "/resolve/" in path}
    assert got == {"README.md", "contents.json", "tensors-00000.safetensors"}


# ------------------------------------------------------------ damaged and malicious folders
class Touch:
    def __reduce__(self):
        return Path("run").mkdir, ()


def edit(folder, change):
    path = folder / "contents.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def replace(folder, write):
    """Other tensors, with their true hash."""
    path = folder / "tensors-00000.safetensors"
    path.unlink()
    write(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    edit(folder, lambda c: c["files"].update({path.name: digest}))


def with_nan(path):
    state = gaussian().state_dict()
    state["mean"][3] = torch.nan
    save_tensors(path, state)


def with_values(posterior, name, values):
    """A posterior that was saved with values which its constructor refuses."""

    def damage(folder):
        (folder / "contents.json").unlink()
        (folder / "tensors-00000.safetensors").unlink()
        posterior.state_dict()[name].copy_(torch.as_tensor(values))
        posterior.save(folder)

    return damage


def flip_a_bit(folder):
    path = folder / "tensors-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def move(folder, name):
    digest = json.loads((folder / "contents.json").read_text())["files"].popitem()[1]
    (folder.parent / "out.safetensors").write_bytes(
        (folder / "tensors-00000.safetensors").read_bytes()
    )
    edit(folder, lambda c: c.update(files={name: digest}))


def of_posterior(**changes):
    return lambda folder: edit(folder, lambda c: c["posterior"].update(changes))


DAMAGES = {
    "a bit": (flip_a_bit, "tensors-00000.safetensors is missing or not as it was written"),
    "no file": (
        lambda f: (f / "tensors-00000.safetensors").unlink(),
        "is missing or not as it was written: get it again",
    ),
    "a pickle": (
        lambda f: replace(f, lambda path: path.write_bytes(pickle.dumps(Touch()))),
        "is no safetensors file, or it is damaged",
    ),
    "an archive of torch": (
        lambda f: replace(f, lambda path: torch.save({"mean": Touch()}, path)),
        "is no safetensors file, or it is damaged",
    ),
    "NaN": (lambda f: replace(f, with_nan), "'mean' holds NaN"),
    "weights": (
        with_values(Mixture([gaussian(), gaussian(1)]), "weights", [10.0, 20.0]),
        "makes no posterior: the weights of a mixture do not sum to 1.",
    ),
    "log_std": (with_values(gaussian(), "log_std", -torch.inf), "deviations are not positive and"),
    "std": (
        with_values(LowRankGaussian.fit(P.populate(template(), 9)), "std", -1.0),
        "makes no posterior: `std` must be finite and not negative.",
    ),
    "root": (with_values(dense(), "root", torch.inf), "deviations are not positive and finite"),
    "a file above": (lambda f: move(f, "../out.safetensors"), "names files that are not its own"),
    "an absolute path": (
        lambda f: move(f, str(f.parent / "out.safetensors")),
        "names files that are not its own",
    ),
    "no hash": (
        lambda f: edit(f, lambda c: c["files"].update({"tensors-00000.safetensors": None})),
        "tensors-00000.safetensors is missing or not as it was written",
    ),
    "another format": (lambda f: edit(f, lambda c: c.update(format=2)), "has format 2, this"),
    "another kind": (lambda f: edit(f, lambda c: c.update(kind="x")), "holds 'x', which this"),
    "a class": (of_posterior(**{"class": "os.system"}), "'os.system' is no kind of posterior"),
    "no settings": (
        lambda f: edit(f, lambda c: c.update(posterior=None)),
        "is damaged, it makes no posterior",
    ),
    "shapes": (of_posterior(shapes={"w": [10**12]}), "is damaged, it makes no posterior"),
    "negative shapes": (of_posterior(shapes={"w": [-2, -13]}), "damaged, it makes no posterior"),
    "order": (of_posterior(order=["w"]), "is damaged, it makes no posterior"),
    "other tensors": (
        lambda f: replace(f, lambda path: save_tensors(path, {"mean": torch.ones(3)})),
        "is damaged, it makes no posterior",
    ),
    "no JSON": (
        lambda f: (f / "contents.json").write_bytes(b"\x80\x04"),
        "contents.json is damaged",
    ),
    "deep JSON": (
        lambda f: (f / "contents.json").write_text("[" * 10**5),
        "contents.json is damaged: it must be an object",
    ),
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
    "few records": (lambda c: c["records"].pop(), "is damaged, it makes no bank"),
    "many records": (lambda c: c["records"].append({}), "it has 5 records of 4 networks"),
    "records": (lambda c: c.update(records=[1] * 4), "is damaged, it makes no bank"),
    "a type": (lambda c: c.update(stored_as="uint8"), "is damaged, it makes no bank"),
    "order": (lambda c: c["order"].pop(), "`order` does not name each of its tensors once"),
    "repeated": (lambda c: c["order"].append("0.bias"), "`order` does not name each of its tens"),
    "weights": (lambda c: c["weights"].append("x"), "`weights` names 'x', which the networks do"),
    "no weights": (lambda c: c.pop("weights"), "is damaged, it makes no bank"),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("name", BANKS)
def test_a_damaged_bank_is_refused_and_leaves_nothing(name, tmp_path):
    change, message = BANKS[name]
    bank = CheckpointBank(tmp_path / "here")
    bank.extend(P.populate(template(), 4))
    write_folder(bank, tmp_path / "it")
    edit(tmp_path / "it", change)
    with pytest.raises(ValueError, match=message):
        from_hub(tmp_path / "it", folder=tmp_path / "there")
    assert not (tmp_path / "there").exists()


@pytest.mark.bad_input
def test_draws_that_are_not_those_of_the_card_are_refused(tmp_path):
    write_folder("two_gaussians", tmp_path / "it")
    edit(tmp_path / "it", lambda c: c["card"].update(sha256="0" * 64))
    with pytest.raises(ValueError, match="its draws are not those of its card"):
        from_hub(tmp_path / "it", folder=tmp_path / "there")


@pytest.mark.bad_input
def test_arguments_that_do_not_fit(tmp_path):
    bank = CheckpointBank(tmp_path / "here")
    with pytest.raises(ValueError, match="holds no network"):
        write_folder(bank, tmp_path / "it")
    bank.append(P.of(template()))
    write_folder(bank, tmp_path / "it")
    with pytest.raises(ValueError, match="`folder` is missing: name a new one"):
        from_hub(tmp_path / "it")
    with pytest.raises(ValueError, match="there is something in .*; name a new one"):
        from_hub(tmp_path / "it", folder=tmp_path / "here")
    with pytest.raises(ValueError, match="`source`: nowhere is no folder of a reference"):
        write_folder("nowhere", tmp_path / "other")
    for odd in (None, [template()]):
        with pytest.raises(ValueError, match="`source` must be a posterior .*, got a (None|list)"):
            write_folder(odd, tmp_path / "other")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="there is something in .*file; name a new one"):
        from_hub(tmp_path / "it", folder=tmp_path / "file")
    for place in ("file", "file/below"):
        with pytest.raises(ValueError, match="is not a folder, nor can it be made"):
            write_folder(gaussian(), tmp_path / place)
    for odd in ("/no/such/folder", "a/b/c/d"):
        with pytest.raises(ValueError, match="`repo_id` must be user/name, or a folder that is th"):
            from_hub(odd)
    with pytest.raises(ValueError, match="holds no posterior, but 'bank'"):
        Posterior.load(tmp_path / "it")

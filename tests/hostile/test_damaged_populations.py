"""A population of which a file is damaged, or that has no room: one sentence, and it goes on."""

import errno
import pickle
import re
import shutil

import pytest
import yaml
from small_populations import CONFIG, networks, same

from lightning_bnn.commands import parts
from lightning_bnn.commands.population import population

pytestmark = pytest.mark.bad_input


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Trains two members in one part; what the bank has then."""
    config = tmp_path_factory.mktemp("config") / "config.yaml"
    config.write_text(yaml.safe_dump(CONFIG))

    def trained(bank):
        change = {"trainer.max_epochs": 1}
        population(str(config), 2, str(bank), change=change, checkpoint_minutes=1e-6)
        return networks(bank)

    return trained


@pytest.fixture(scope="module")
def whole(train, tmp_path_factory):
    """A population that is finished: its folder, and its networks."""
    folder = tmp_path_factory.mktemp("whole") / "bank"
    return folder, train(folder)


@pytest.fixture
def finished(whole, tmp_path):
    """A copy of its folder."""
    return shutil.copytree(whole[0], tmp_path / "bank")


DAMAGE = {
    "empty": lambda content: b"",
    "zeros": lambda content: bytes(len(content)),
    "cut": lambda content: content[: 2 * len(content) // 3],
    "no text": lambda content: b"\xff" + content,
    "nested without end": lambda content: b"[" * 10**5,
    "a list": lambda content: b"[" + content + b"]",
    "other names": lambda content: content.replace(b'"', b'"x', 1),
    "other types": lambda content: re.sub(rb": (\[[^\]]*\]|\{[^{]*\})", b": 3", content),
}


PART = "parts/0000000-0000002/part.json"
ADVICE = {PART: "remove it to train", "population.json": "restore a copy, or"}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_of_a_folder_is_named_and_stays(kind, train, finished):
    for name, advice in ADVICE.items():
        path = finished / name
        whole, damaged = path.read_bytes(), DAMAGE[kind](path.read_bytes())
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"{path} is damaged: {advice}") as told:
            train(finished)
        assert "\n" not in str(told.value)
        assert path.read_bytes() == damaged
        assert len(networks(finished)) == 2
        path.write_bytes(whole)


def test_what_the_sentences_propose(train, whole, finished):
    """A part without its end is trained again, and a damaged configuration is written anew."""
    (finished / PART).unlink()
    path = finished / "config.yaml"
    content = path.read_bytes()
    for torn in (b"", b"model: {", b"\xff"):
        path.write_bytes(torn)
        same(whole[1], train(finished))
        assert path.read_bytes() == content


def flipped(content):
    """One bit of the weights: torch would read it without a word."""
    place = content.index(b"data/0") + 200
    return content[:place] + bytes([content[place] ^ 8]) + content[place + 1 :]


@pytest.fixture(scope="module")
def checkpoint(train, tmp_path_factory):
    """What an attempt that was killed has left: its folder, and a checkpoint."""

    def killed(*_):
        raise KeyboardInterrupt

    folder = tmp_path_factory.mktemp("killed") / "bank"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "_outcome", killed)
        with pytest.raises(KeyboardInterrupt):
            train(folder)
    (path,) = folder.rglob("*.ckpt")
    return folder, path, path.read_bytes()


CHECKPOINTS = {
    "as it was": lambda content: content,
    **{kind: DAMAGE[kind] for kind in ("empty", "zeros", "cut")},
    "flipped": flipped,
    "a pickle": lambda _: pickle.dumps(re.compile("anything")),
    "a hole": lambda content: content[:100] + bytes(50) + content[150:],
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_damaged_checkpoint_is_skipped(kind, checkpoint, caplog):
    _, path, content = checkpoint
    path.write_bytes(CHECKPOINTS[kind](content))
    found, fine = parts.whole_checkpoint(path.parent.glob("*.ckpt")), kind == "as it was"
    path.write_bytes(content)
    assert found == (path if fine else None)
    assert ("plain data: skipped" in caplog.text) != fine


def test_a_part_with_a_damaged_checkpoint_is_trained_from_the_start(
    checkpoint, train, whole, caplog
):
    folder, path, content = checkpoint
    path.write_bytes(flipped(content))
    same(whole[1], train(folder))
    assert "plain data: skipped" in caplog.text


# ------------------------------------------------------------ no room
def test_a_file_that_does_not_fit_leaves_the_one_before(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "part.json"
    parts.write_whole(path, "before")
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        parts.write_whole(path, "after")
    assert [p.read_text() for p in tmp_path.iterdir()] == ["before"]


def test_a_part_that_is_a_link_is_refused(train, finished, tmp_path):
    part = finished / "parts" / "0000000-0000002"
    part.rename(tmp_path / "elsewhere")
    part.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="must be a regular folder, but is a link"):
        train(finished)

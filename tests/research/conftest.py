"""What several studies read."""

import fake_files
import pytest


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Digits of noise, and a short text."""
    fake_files.mnist(tmp_path)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "tinyshakespeare.txt").write_text("to be, or not to be: that is " * 40)
    monkeypatch.setenv("LIGHTNING_BNN_DATA", str(tmp_path))
    return tmp_path

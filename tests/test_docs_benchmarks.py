"""The tables of the pages are those of the recorded files, and the files can be made again."""

import importlib
import json
import re
import shlex
import sys
import time

import pytest
import torch
from pages import ROOT, page

FILES = sorted((ROOT / "docs" / "benchmarks").glob("*.json"))
PAGES = ("docs/benchmarks.md", "docs/scale.md")


@pytest.fixture
def script(monkeypatch):
    """A module of the folder of benchmarks."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    known = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - known:
        if "/benchmarks/" in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


@pytest.mark.parametrize("name", PAGES)
def test_tables_are_those_of_the_files(name, script):
    assert script("tables").filled(page(name)) == page(name)


def test_every_file_is_shown_once_and_made_by_a_run(script):
    on_pages = [name for p in PAGES for name in script("tables").shown(page(p))]
    assert sorted(on_pages) == sorted(path.stem for path in FILES)
    assert set(on_pages) <= set(script("bench").RUNS) == set(script("layouts").LAYOUTS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_says_how_it_was_made(path, script):
    """The command of `make bench`, but for the number of rounds, which the rows state."""
    content = json.loads(path.read_text(encoding="utf-8"))
    words = ["python", *shlex.split(f"benchmarks/{script('bench').RUNS[path.stem]}")]
    assert shlex.split(content["command"])[: len(words)] == words or "--repeats" in words
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", content["date"])
    assert content["machine"].keys() == {"cpu", "cores", "memory_gib"}
    assert {"python", "torch", "lightning", "lightning_bnn"} <= content["versions"].keys()
    for row in content["rows"]:
        assert "value" in row or (row["repeats"] >= 1 and len(row["wall"]) == len(row["cpu"]) == 3)


def test_another_number_is_noticed(script, tmp_path):
    """On the page or in the file."""
    tables, text = script("tables"), page(PAGES[0])
    number = re.search(r"table: ratios -->.*?\| (\d[\d.]*) \|", text, re.DOTALL)
    changed = text[: number.start(1)] + "123" + text[number.end(1) :]
    assert tables.filled(changed) == text
    for path in FILES:
        content = json.loads(path.read_text())
        if path.stem == "ratios":
            content["rows"][0]["value"] = 123.0
        (tmp_path / path.name).write_text(json.dumps(content))
    assert tables.filled(text, tmp_path) == changed


def test_a_table_without_a_file_is_no_table(script):
    with pytest.raises(FileNotFoundError):
        script("tables").filled("<!-- table: nothing -->\n<!-- end -->")


@pytest.mark.parametrize("name", PAGES)
def test_every_table_leads_to_its_file(name, script):
    linked = re.findall(r"data: \[(\w+)\.json\]\((\S+)\)", page(name))
    assert [stem for stem, _ in linked] == script("tables").shown(page(name))
    assert all(ROOT / "docs" / place in FILES for _, place in linked)


# ------------------------------------------------------------ what is recorded
def test_the_versions_are_those_of_what_is_installed(script):
    found = script("record").circumstances()["versions"]
    assert "unknown" not in found.values()
    assert {"torch", "llvmlite"} <= found.keys()


def options(path=None, threads=1):
    return type("Options", (), {"threads": threads, "device": "cpu", "record": path})()


def test_times_and_values_come_back(script, tmp_path, capsys, monkeypatch):
    record, turns = script("record"), script("turns")
    monkeypatch.setattr(sys, "argv", ["/x/apply.py", "a", "--record", "b.json", "--repeats", "3"])
    made = record.Record(options(tmp_path / "new" / "it.json"))
    wall, cpu = [1.0, 2.0, 3.0, 4.0, 9.0], [0.5, 0.5, 1.5, 2.5, 2.5]
    made.times({"us": turns.Times(1, "cpu", wall, cpu)}, network="MLP")
    made.value("error", 1e-3)
    made.write()
    content = json.loads((tmp_path / "new" / "it.json").read_text())
    assert content["command"] == "python benchmarks/apply.py a --repeats 3"
    row, value = content["rows"]
    assert (row["wall"], row["cpu"], row["repeats"]) == ([2.0, 3.0, 4.0], [0.5, 1.5, 2.5], 5)
    assert (row["clock"], row["network"], value["value"]) == ("cpu", "MLP", 1e-3)
    assert "1500.000 ms" in capsys.readouterr().out
    assert script("bench").is_of_here(tmp_path / "new" / "it.json")
    content["versions"]["torch"] = "1.0"
    (tmp_path / "other.json").write_text(json.dumps(content))
    assert not script("bench").is_of_here(tmp_path / "other.json")
    assert not script("bench").is_of_here(tmp_path / "missing.json")


def test_nothing_is_written_unasked(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script("record").Record(options()).write()
    assert not list(tmp_path.iterdir())


def test_contestants_take_turns(script):
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    found = script("turns").taking_turns(calls, 2, warm=1)
    assert order == ["a", "b"] * 3
    assert [len(times.rounds) for times in found.values()] == [2, 2]
    assert all(0 <= cpu <= 1 for times in found.values() for cpu in times.cpu)


@pytest.mark.parametrize(("seconds", "best"), [({1: 0.002, 2: 0.03}, 1), ({1: 0.03, 2: 0.002}, 2)])
def test_everybody_has_the_threads_that_suit(script, seconds, best):
    """Threads that hinder each other are taken away, also from a peer."""
    torch.set_num_threads(2)
    calls = {"it": lambda: time.sleep(seconds[torch.get_num_threads()])}
    found = script("turns").taking_turns(calls, 1, warm=0)["it"]
    assert (found.threads, torch.get_num_threads()) == (best, 2)
    assert found.clock == ("cpu" if best == 1 else "wall")


def test_the_clock_is_that_of_the_cpu_where_it_says_something(script):
    times = script("turns").Times
    assert (times().clock, times(2).clock, times(1, "cuda").clock) == ("cpu", "wall", "wall")
    both = times(2, "cpu", [1.0, 3.0, 2.0], [5.0, 6.0, 7.0])
    assert (both.seconds, both.after(1).wall, both.longest(1).wall) == (2.0, [3.0, 2.0], [3.0])


# ------------------------------------------------------------ runs of `make bench`
def bench_in(script, monkeypatch, folder, code):
    bench = script("bench")
    monkeypatch.setattr(bench, "RUNS", {"one": "one.py --x", "two": "two.py"})
    monkeypatch.setattr(bench, "PRINTED", {})
    for name in ("SCRIPTS", "FILES"):
        monkeypatch.setattr(bench, name, folder)
    monkeypatch.setattr(bench, "fill_pages", lambda: None)
    tables = script("tables")
    monkeypatch.setattr(tables, "LAYOUTS", dict.fromkeys(("one", "two"), lambda rows: rows[0]["t"]))
    for name in ("one", "two"):
        (folder / f"{name}.py").write_text(code)
    return bench


WRITING = """
import json, sys
from pathlib import Path
sys.path.insert(0, {place!r})
from record import circumstances
content = {{"date": "x", "argv": sys.argv[1:-2], "command": "", "threads": 1, **circumstances()}}
content["rows"] = [{{"{key}": [["a"], ["b"]]}}]
Path(sys.argv[-1]).write_text(json.dumps(content))
"""


def writing(key):
    return WRITING.format(place=str(ROOT / "benchmarks"), key=key)


def test_what_was_measured_is_kept(script, tmp_path, monkeypatch, capsys):
    bench = bench_in(script, monkeypatch, tmp_path, writing("t"))
    monkeypatch.setattr(sys, "argv", ["bench.py", "--only", "one"])
    bench.main()
    assert json.loads((tmp_path / "one.json").read_text())["argv"] == ["--x"]
    assert not (tmp_path / "two.json").exists()
    (tmp_path / "one.py").write_text("raise SystemExit(3)")
    monkeypatch.setattr(sys, "argv", ["bench.py"])
    bench.main()
    assert (tmp_path / "two.json").is_file()
    assert "[1/2] one: kept (x)" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["bench.py", "--again"])
    with pytest.raises(SystemExit, match="failed: one;"):
        bench.main()
    assert sorted(path.name for path in tmp_path.glob("*.[jn]*")) == ["one.json", "two.json"]


def test_a_file_without_all_rows_is_not_kept(script, tmp_path, monkeypatch, capsys):
    """A peer was not installed."""
    bench = bench_in(script, monkeypatch, tmp_path, writing("other"))
    assert not bench.run("one")
    assert not (tmp_path / "one.json").exists()
    assert "not all that its table shows" in capsys.readouterr().out


def test_a_file_is_not_replaced_by_one_without_a_peer(script, tmp_path, monkeypatch, capsys):
    """Where a peer is not installed, its rows of before are kept."""
    bench = script("bench")
    content = json.loads((bench.FILES / "samplers_update.json").read_text())
    (tmp_path / "new").mkdir()
    monkeypatch.setattr(bench, "FILES", tmp_path)
    (tmp_path / "samplers_update.json").write_text(json.dumps(content))
    new = tmp_path / "new" / "samplers_update.json"
    new.write_text(json.dumps(content))
    assert bench._is_complete("samplers_update", new.parent)
    content["rows"] = [r for r in content["rows"] if not r["who"].startswith("torch-uncertainty")]
    new.write_text(json.dumps(content))
    assert not bench._is_complete("samplers_update", new.parent)
    assert "torch-uncertainty SGHMC, torch-uncertainty SGLD left out" in capsys.readouterr().out

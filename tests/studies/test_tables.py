"""Tables as text, Markdown, CSV and JSON, and what is published."""

import csv
import io
import json
import math
import re
import sys
import types

import pytest
import torch

from lightning_bnn.plots import Line, lines_figure
from lightning_bnn.plots.page import Section, html_report
from lightning_bnn.studies.findings import Findings, publish, results_folder, settings_of
from lightning_bnn.studies.width import SCALES
from lightning_bnn.tables import Measured, Table, spread
from weightsym.extras import MissingPackage

TABLE = Table(
    "A table",
    ["method", "error", "count"],
    [["SWAG", Measured(1.23456, 0.5), 3], ["<b>", Measured(math.nan), 4], ["x", 1e-9, 5]],
    {"error": 2},
    "a note",
)


def findings():
    line = Line(torch.arange(3.0), torch.arange(3.0))
    figure = lines_figure({"title": {"a": line, "b": line}}, ("x", "y"))
    return Findings("name", "Title", {"t": TABLE}, {"f": figure}, ["remark"], {"seed": 3})


def test_text_and_markdown_show_errors_and_a_slash_for_what_is_not_there():
    assert [row[1] for row in TABLE.cells()] == ["1.23 ± 0.50", "/", "1e-09"]
    assert [row[2] for row in TABLE.cells()] == ["3", "4", "5"]
    assert TABLE.text().splitlines()[0] == "A table"
    assert TABLE.text().endswith("a note")
    assert "| SWAG | 1.23 ± 0.50 | 3 |" in TABLE.markdown()


def test_csv_and_json_keep_all_digits():
    rows = list(csv.DictReader(io.StringIO(TABLE.csv())))
    assert float(rows[0]["error"]) == 1.23456
    assert float(rows[0]["error (error)"]) == 0.5
    held = json.loads(json.dumps(TABLE.json(), allow_nan=False))
    assert held["rows"][0][1] == {"value": 1.23456, "error": 0.5}
    assert held["rows"][1][1]["value"] is None


def test_a_minus_sign_needs_a_number():
    table = Table("", ["a"], [[-0.001], [-0.01]], 2)
    assert [row[0] for row in table.cells()] == ["0.00", "-0.01"]


def test_spread_of_one_value_has_no_error():
    assert math.isnan(spread(torch.tensor([2.0])).error)


def test_everything_is_written(tmp_path, capsys):
    publish(findings(), tmp_path / "out")
    publish(findings(), tmp_path / "out")
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert {"t.csv", "README.md", "results.json", "f.png", "f.svg"} <= names
    held = json.loads((tmp_path / "out" / "results.json").read_text())
    assert held["settings"] == {"seed": 3}
    assert held["tables"]["t"]["title"] == "A table"
    assert "remark" in capsys.readouterr().out


def test_a_page_needs_no_other_file():
    found = findings()
    page = html_report("A & B", "about", [Section("One", ["<i>"], "code", [TABLE], found.figures)])
    assert "A &amp; B" in page
    assert "&lt;b&gt;" in page
    assert "&lt;i&gt;" in page
    assert page.count('src="data:image/png;base64,') == 1
    assert "http" not in page


def test_a_data_frame_has_all_digits_and_errors_apart(monkeypatch):
    """As `pandas.read_csv` gets it, which is not among the packages that tests need."""
    read = types.SimpleNamespace(read_csv=lambda text: list(csv.DictReader(text)))
    monkeypatch.setitem(sys.modules, "pandas", read)
    table = Table("T", ["m", "a"], [["x", Measured(1 / 3, 0.5)], ["y", Measured(2.0)]], 1)
    first, second = table.to_pandas()
    assert first == {"m": "x", "a": str(1 / 3), "a (error)": "0.5"}
    assert second["a (error)"] == "nan"
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingPackage, match="A data frame needs pandas: pip install pandas"):
        table.to_pandas()


def test_only_a_folded_table_has_a_title_to_click_on():
    table = Table("A & B", ["<m>"], [["<b>"]], note="<note>")
    for folded in (True, False):
        page = table.html(folded)
        assert page.startswith("<details><summary>A &amp; B</summary>") == folded
        assert ("<caption>A &amp; B</caption>" in page) != folded
        assert "&lt;b&gt;" in page
        assert "&lt;note&gt;" in page
        assert not {"<b>", "<m>", "<note>"} & set(re.findall(r"<\w+>", page))
    assert table._repr_html_() == table.html()


def test_settings_of_a_scale_can_be_replaced():
    assert settings_of(SCALES, "small", members=None) == SCALES["small"]
    assert settings_of(SCALES, "small", members=2).members == 2


def test_a_study_writes_into_folders_of_its_own(tmp_path):
    own = results_folder(str(tmp_path / "a" / "b"), "toy")
    (own / "results.json").write_text("")
    assert results_folder(str(own), "toy") == own


@pytest.mark.bad_input
def test_what_others_have_put_into_a_folder_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(ValueError, match="holds other things than results of toy"):
        results_folder(str(tmp_path), "toy")
    results_folder(str(tmp_path / "new"), "mass")
    with pytest.raises(ValueError, match="holds other things than results of toy"):
        results_folder(str(tmp_path / "new"), "toy")
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["mine.txt"]


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: settings_of(SCALES, "huge"), "`scale` must be one of small, paper"),
        (lambda: settings_of(SCALES, "small", members=0), "`members` must be positive"),
        (lambda: settings_of(SCALES, "small", widths=[5, -1]), "`widths` must be positive"),
        (lambda: results_folder("/proc/nothing/here", "toy"), "`out` must be a folder"),
    ],
)
def test_bad_settings(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()

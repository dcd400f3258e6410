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

from lightning_bnn.findings import results_folder
from lightning_bnn.plots import Line, lines_figure
from lightning_bnn.plots.page import html_report, section
from lightning_bnn.tables import Measured, Table, spread
from weightsym.extras import MissingPackage

TABLE = Table(
    "A table",
    ["method", "error", "count"],
    [["SWAG", Measured(1.23456, 0.5), 3], ["<b>", Measured(math.nan), 4], ["x", 1e-9, 5]],
    {"error": 2},
    "a note",
)


def test_text_and_markdown_show_errors_and_a_slash_for_what_is_not_there():
    assert [row[1:] for row in TABLE.cells()] == [["1.23 ± 0.50", "3"], ["/", "4"], ["1e-09", "5"]]
    lines = TABLE.text().splitlines()
    assert (lines[0], lines[-1]) == ("A table", "a note")
    assert "| SWAG | 1.23 ± 0.50 | 3 |" in TABLE.markdown()
    signs = Table("", ["a"], [[-0.001], [-0.01]], 2)  # a minus sign needs a number
    assert [row[0] for row in signs.cells()] == ["0.00", "-0.01"]
    assert math.isnan(spread(torch.tensor([2.0])).error)


def test_csv_json_and_data_frames_keep_all_digits(monkeypatch):
    """As `pandas.read_csv` gets it, which is not among the packages that tests need."""
    read = types.SimpleNamespace(read_csv=lambda text: list(csv.DictReader(text)))
    monkeypatch.setitem(sys.modules, "pandas", read)
    for rows in (list(csv.DictReader(io.StringIO(TABLE.csv()))), TABLE.to_pandas()):
        assert float(rows[0]["error"]) == 1.23456
        assert float(rows[0]["error (error)"]) == 0.5
        assert rows[1]["error (error)"] == "nan"
    held = json.loads(json.dumps(TABLE.json(), allow_nan=False))
    assert held["rows"][0][1] == {"value": 1.23456, "error": 0.5}
    assert held["rows"][1][1]["value"] is None
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingPackage, match="A data frame needs pandas: pip install pandas"):
        TABLE.to_pandas()


def test_a_page_needs_no_other_file_and_nothing_in_it_is_markup():
    line = Line(torch.arange(3.0), torch.arange(3.0))
    figures = {"f": lines_figure({"title": {"a": line, "b": line}}, ("x", "y"))}
    page = html_report("A & B", "about", [section("One", ["<i>"], "code", [TABLE], figures)])
    assert page.count('src="data:image/png;base64,') == 1
    assert "http" not in page
    assert all(text in page for text in ("A &amp; B", "&lt;b&gt;", "&lt;i&gt;"))
    table = Table("A & B", ["<m>"], [["<b>"]], note="<note>")
    for folded in (True, False):  # only a folded table has a title to click on
        page = table.html(folded)
        assert page.startswith("<details><summary>A &amp; B</summary>") == folded
        assert ("<caption>A &amp; B</caption>" in page) != folded
        assert "&lt;note&gt;" in page
        assert not {"<b>", "<m>", "<note>"} & set(re.findall(r"<\w+>", page))
    assert table._repr_html_() == table.html()


@pytest.mark.bad_input
def test_what_others_have_put_into_a_folder_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("precious")
    own = results_folder(str(tmp_path / "new" / "deep"), "toy")
    (own / "results.json").write_text("")
    assert results_folder(str(own), "toy") == own
    for folder, name in ((tmp_path, "toy"), (own, "mass")):
        with pytest.raises(ValueError, match=f"holds files other than results of {name}"):
            results_folder(str(folder), name)
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["mine.txt"]


@pytest.mark.bad_input
def test_a_folder_that_cannot_be_written_to_is_refused():
    with pytest.raises(ValueError, match="`out` must be a writable folder"):
        results_folder("/proc/nothing/here", "toy")

"""Reports survive the disk, say all that was found, and damaged ones are refused in a sentence."""

import math
from html.parser import HTMLParser

import pytest

from lightning_bnn.doctor import Finding, Report
from lightning_bnn.doctor.page import html_of, markdown_of

FAULT = Finding("step_too_large", "fault", "It is 3 <b>.", "That is bad.", "Halve it.", {"x": 3.0})
NOTE = Finding("chains_are_copies", "note", "They are.", "Nothing is wrong.", "Nothing.", {})
REPORT = Report(
    [FAULT, NOTE], ["miscalibrated"], {"not_burnt_in": "there are no chains"},
    {"place": "run", "seconds": 0.5}, {"loss": [1.0, math.nan, math.inf]},
)  # fmt: skip


class Words(HTMLParser):
    """All text of a page."""

    def __init__(self, page):
        super().__init__()
        self.text = ""
        self.feed(page)

    def handle_data(self, data):
        self.text += data


def test_a_report_that_was_written_is_read_as_it_was(tmp_path):
    path = tmp_path / "doctor.json"
    path.write_text(REPORT.to_json())
    again = Report.read(path)
    assert again.findings == REPORT.findings
    assert (again.fine, again.skipped, again.facts) == (REPORT.fine, REPORT.skipped, REPORT.facts)
    assert again.curves["loss"][0] == 1.0
    assert math.isnan(again.curves["loss"][1])
    assert math.isnan(again.curves["loss"][2])


def test_text_markdown_and_page_say_the_same():
    for shown in (REPORT.text(), markdown_of(REPORT), Words(html_of(REPORT)).text):
        for part in ("1 fault, 1 note", "It is 3 <b>.", "That is bad.", "Halve it.", "They are."):
            assert part in shown
        assert "miscalibrated" in shown.lower()


def test_what_users_wrote_is_no_markup_on_the_page():
    assert "It is 3 &lt;b&gt;." in html_of(REPORT)


def test_nothing_found_is_said():
    assert Report([], ["miscalibrated"]).headline().startswith("nothing found")
    assert Report([]).headline() == "nothing could be looked at"
    assert "2 faults" in Report([FAULT, FAULT]).headline()


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"findings": [{}], "curves": {}}', '{"findings": [], "curves": {"loss": 3}}',
     '{"findings": [], "curves": {}, "other": 1}', '{"findings": 3, "curves": {}}', "\0"],
)  # fmt: skip
def test_a_damaged_report_is_refused_in_a_sentence(content, tmp_path):
    path = tmp_path / "doctor.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"doctor.json is not a report of the doctor"):
        Report.read(path)

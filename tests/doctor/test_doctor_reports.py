"""Reports survive the disk, say all that was found, and damaged ones are refused in a sentence."""

import math

import pytest

from lightning_bnn.doctor import Finding, Report

FAULT = Finding("fault", "It is 3 <b>.", "That is bad.", "Halve it.", {"x": 3.0}, "step_too_large")
NOTE = Finding("note", "They are.", "Nothing is wrong.", "Nothing.", {}, "chains_are_copies")
REPORT = Report(
    [FAULT, NOTE], ["miscalibrated"], {"not_burnt_in": "there are no chains"},
    {"place": "run", "seconds": 0.5}, {"loss": [1.0, math.nan, math.inf]},
)  # fmt: skip


def test_a_report_that_was_written_is_read_as_it_was(tmp_path):
    path = REPORT.write(tmp_path / "new")
    assert path.name == "doctor.json"
    again = Report.read(path)
    assert again.findings == REPORT.findings
    assert (again.fine, again.skipped, again.facts) == (REPORT.fine, REPORT.skipped, REPORT.facts)
    assert again.curves["loss"][0] == 1.0
    assert math.isnan(again.curves["loss"][1])
    assert math.isnan(again.curves["loss"][2])


def test_text_and_markdown_say_the_same():
    for shown in (REPORT.text(), REPORT.markdown()):
        for part in ("1 fault, 1 note", "It is 3 <b>.", "That is bad.", "Halve it.", "They are."):
            assert part in shown
        assert "miscalibrated" in shown.lower()


def test_nothing_found_is_said():
    assert Report([], ["miscalibrated"]).headline().startswith("nothing found")
    assert Report([]).headline() == "nothing could be looked at"
    skipped = {"not_burnt_in": "no chains", "draws_alike": "no data", "miscalibrated": "no data"}
    said = "only 1 of 4 checks possible (no data); they found nothing"
    assert Report([], ["labels_out_of_range"], skipped).headline() == said
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

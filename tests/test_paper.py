"""The draft of the paper is as long as the journal asks, and cites what its bibliography holds."""

import re

from pages import page

TEXT = page("paper/paper.md").split("\n---\n", 1)[1]
BIBLIOGRAPHY = page("paper/paper.bib")
ENTRIES = dict(re.findall(r"^@\w+\{(\w+),\n(.*?)^\}$", BIBLIOGRAPHY, re.MULTILINE | re.DOTALL))


def test_it_is_as_long_as_the_journal_asks():
    assert 750 <= len(TEXT.split()) <= 1500


def test_what_is_cited_is_there_and_what_is_there_is_cited():
    cited = set(re.findall(r"@(\w+)", TEXT))
    assert cited == ENTRIES.keys()
    assert BIBLIOGRAPHY.count("\n@") + 1 == len(ENTRIES)


def test_every_entry_can_be_found():
    for name, fields in ENTRIES.items():
        assert re.search(r"^  (doi|url) = \{\S+\}", fields, re.MULTILINE), name
        assert "author = {" in fields, name
        assert re.search(r"year = \{(19|20)\d\d\}", fields), name


def test_it_has_the_sections_that_are_asked_for():
    headings = re.findall(r"^# (.+)$", TEXT, re.MULTILINE)
    asked = ["Summary", "Statement of need", "State of the field", "Software design"]
    assert headings[:4] == asked
    assert headings[-1] == "References"

"""The draft of the paper cites what its bibliography holds, and nothing else is in it."""

import re

from pages import page


def test_what_is_cited_is_there_and_what_is_there_is_cited():
    cited = set(re.findall(r"@(\w+)", page("paper/paper.md").split("\n---\n", 1)[1]))
    assert cited == set(re.findall(r"^@\w+\{(\w+),$", page("paper/paper.bib"), re.MULTILINE))

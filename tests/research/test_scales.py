"""Settings of studies: those of a scale, or one's own in their place."""

import pytest

from bnn_research.scales import settings_of
from bnn_research.width import SCALES


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: settings_of(SCALES, "huge"), "`scale` must be one of small, paper"),
        (lambda: settings_of(SCALES, "small", members=0), "`members` must be positive"),
        (lambda: settings_of(SCALES, "small", widths=[5, -1]), "`widths` must be positive"),
    ],
)
def test_bad_settings(call, sentence):
    assert settings_of(SCALES, "small", members=None) == SCALES["small"]  # the controls
    assert settings_of(SCALES, "small", members=2).members == 2
    with pytest.raises(ValueError, match=sentence):
        call()

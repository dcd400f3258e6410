"""Tables of what is refused: calls, and the sentence with which each of them ends."""

import pytest


def refuses(*table, given=tuple):
    """The test that every call, of what is given, ends in a `ValueError` with its sentence."""

    @pytest.mark.bad_input
    @pytest.mark.parametrize(("call", "sentence"), table)
    def test(call, sentence):
        with pytest.raises(ValueError, match=sentence):
            call(*given())

    return test

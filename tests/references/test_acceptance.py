"""What the score must do on the posteriors that ship: know their own law, and tell others apart."""

import pytest
import torch

from lightning_bnn.metrics import law_mmd, mmd
from lightning_bnn.references import read_reference
from weightsym import params as P

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.e2e]


MODES = 10


@pytest.fixture(scope="module", params=["two_gaussians", "digits"])
def halves(request):
    """Networks of four chains with the chain of each, and draws of the other four, far apart."""
    stored = read_reference(request.param)[0]
    names = P.weight_names(stored.network)
    one, other = stored.only(range(4)).thinned(25), stored.only(range(4, 8)).thinned(3)
    stacks = [{n: each.networks()[n] for n in names} for each in (one, other)]
    return stacks[0], one.chains(), {n: t[:MODES] for n, t in stacks[1].items()}


def narrow_modes(centres, size):
    """As many networks around each of some draws: over modes they have the law of the draws."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: (
            t[:, None]
            + 0.03 * t.std(0) * torch.randn(len(t), size, *t.shape[1:], generator=generator)
        ).flatten(0, 1)
        for name, t in centres.items()
    }


@pytest.mark.parametrize("size", [1, 20, 100])
def test_modes_of_the_reference_s_own_law_are_no_distance_away(halves, size):
    """However many networks each has. All networks alike, as P1 pools them, are: by 1 / K of one.

    A thousand networks take three seconds, of the digits six.
    """
    reference, chains, centres = halves
    own = narrow_modes(centres, size)
    law = law_mmd(reference, own, torch.arange(MODES).repeat_interleave(size), chains=chains)
    assert abs(law.value) < 2 * law.error
    pooled = mmd(reference, own)
    assert (pooled > max(0.03, 6 * law.error)) == (size > 1)


def test_modes_of_another_law_are_told_apart(halves):
    reference, chains, centres = halves
    wider = narrow_modes({name: 2 * t for name, t in centres.items()}, 20)
    law = law_mmd(reference, wider, torch.arange(MODES).repeat_interleave(20), chains=chains)
    assert law.value > 5 * law.error

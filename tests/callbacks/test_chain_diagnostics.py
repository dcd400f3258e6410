"""R-hat and sample sizes of chains: those of the metrics, and of permuted copies of one mode."""

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from module_cases import Blobs, network, trainer
from runs import Unreadable
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_bnn import samplers
from lightning_bnn.callbacks import ChainDiagnostics
from lightning_bnn.metrics import effective_sample_size, rhat, tail_effective_sample_size
from lightning_bnn.modules import SGHMC
from weightsym import canonicalise, discover, permute, random_permutations
from weightsym import params as P

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("undrawn")]


def chains(net=None, **options):
    torch.manual_seed(0)
    return SGHMC(
        net or network(), every_n_steps=2, optimizer=lambda p: samplers.SGHMC(p, lr=0.02),
        **{"members": 2, **options},
    )  # fmt: skip


def test_the_numbers_are_those_of_the_metrics(tmp_path):
    module, look = chains(), ChainDiagnostics(inputs=5, weights=1000)
    run = trainer(look, max_epochs=5, logger=TensorBoardLogger(tmp_path))
    run.fit(module, Blobs())
    held = module.state.chains()
    flat = {n: t.flatten(0, 1) for n, t in held.items()}
    outputs = P.apply(module.template.eval(), flat, *look._probe).double().softmax(-1)
    symmetries = discover(module.template, *module.example())
    spaces = {
        "function": outputs.flatten(1),
        "weights": P.ravel(flat, stacked=True)[0],
        "canonical": P.ravel(canonicalise(flat, symmetries), stacked=True)[0],
    }
    for space, rows in spaces.items():
        values = rows.double().unflatten(0, (2, 15))
        torch.testing.assert_close(look.values[space], values)
        logged = run.callback_metrics
        assert logged[f"posterior/rhat_max/{space}"] == pytest.approx(float(rhat(values).max()))
        wanted = float(effective_sample_size(values).min())
        assert logged[f"posterior/ess_min/{space}"] == pytest.approx(wanted)
        wanted = float(tail_effective_sample_size(values).min())
        assert logged[f"posterior/ess_tail_min/{space}"] == pytest.approx(wanted)
    events = EventAccumulator(run.log_dir, {"images": 0}).Reload()
    cards = {f"posterior/chains/{name}" for name in ("function", "weights", "canonical", "rhat")}
    assert set(events.Tags()["images"]) == cards
    assert "posterior/rhat_median/canonical" in events.Tags()["scalars"]


def test_sure_predictions_are_told_apart():
    """Their probabilities are all 1 in float32, and constant chains have no R-hat to speak of."""
    module, look = chains(), ChainDiagnostics(inputs=5)
    trainer(look, max_epochs=1).fit(module, Blobs())
    sure = {n: (60 * t if n[0] == "3" else t).float() for n, t in module.member_stack().items()}
    outputs = P.apply(module.template.eval(), sure, look._probe[0].float())
    module.float()
    assert len(outputs.softmax(-1).unique()) < len(look._predictions(module, sure).unique())


def test_chains_in_permuted_copies_of_one_mode_agree_once_canonical():
    """Two chains around one network, one of them with its units in another order."""
    module = chains(network(width=5))
    sym = discover(module.template, torch.randn(2, 6))
    g = torch.Generator().manual_seed(0)
    own = {n: 3 * t[:1].clone() for n, t in module.member_stack().items()}
    order = random_permutations(sym, generator=g)
    for _ in range(40):
        one, two = (
            {n: t + 0.01 * torch.randn(t.shape, generator=g) for n, t in own.items()}
            for _ in range(2)
        )
        moved = permute({n: t[0] for n, t in two.items()}, sym, order)
        pair = {n: torch.stack([one[n][0], moved[n]]) for n in own}
        module.state.samples.append(pair)
    look = ChainDiagnostics()
    look._probe = (torch.randn(8, 6, generator=g),)
    module.example_input_array = torch.randn(2, 6)
    look._collect(module)
    worst = {space: float(rhat(values).max()) for space, values in look.values.items()}
    assert worst["function"] < 1.3
    assert worst["canonical"] < 1.3
    assert worst["weights"] > 1.8


def test_without_symmetries_there_is_the_rest(tmp_path):
    look = ChainDiagnostics()
    run = trainer(look, max_epochs=4, default_root_dir=tmp_path)
    with pytest.warns(UserWarning, match="ChainDiagnostics has no canonical form"):
        run.fit(chains(Unreadable.Net()), Blobs())
    assert set(look.values) == {"function", "weights"}

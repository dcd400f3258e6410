"""Do conformal sets and intervals cover as often as they say? 200 splits of real predictions.

The validation and test predictions of an ensemble are split at random again and again; one half
calibrates, the other is covered or not. Whatever the predictions are, the mean coverage of such
splits is known exactly: k / (n + 1) for the k-th smallest of n scores. The last rows of each table
are the control: sets and intervals as the predicted probabilities ask for.

python benchmarks/conformal.py [--splits 200] [--alpha 0.1]
"""

import argparse
import math
from collections.abc import Callable

import lightning as L
import torch
from torch import Tensor

from lightning_bnn import metrics as M
from lightning_bnn.calibration import (
    conformal_intervals,
    conformal_sets,
    mean_band,
    quantile_band,
)
from lightning_bnn.calibration.finite_quantile import conformal_rank
from lightning_bnn.comparison.calibration import credible_sets
from lightning_bnn.comparison.tables import text_table
from lightning_bnn.datamodules import DataModule, Digits, Splits
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.models import mlp
from lightning_bnn.modules import DeepEnsemble
from lightning_bnn.quiet_runs import quiet
from lightning_bnn.randomness import keyed_generator

Split = tuple[Tensor, Tensor]


class Diabetes(DataModule):
    """Progression of diabetes a year later, standardised; 442 patients."""

    def load(self) -> Splits:
        from sklearn.datasets import load_diabetes

        data = load_diabetes(scaled=True)
        inputs, targets = (torch.tensor(t, dtype=torch.float32) for t in (data.data, data.target))
        inputs, targets = inputs / inputs.std(0), (targets - targets.mean()) / targets.std()
        order = torch.randperm(len(inputs), generator=keyed_generator(self.seed, "diabetes"))
        rows = order.split([142, 150, 150])
        train, val, test = ((inputs[r], targets[r, None]) for r in rows)
        return Splits(train, val, test)


def trained(module: L.LightningModule, data: DataModule, epochs: int) -> None:
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with quiet():
        trainer = L.Trainer(max_epochs=epochs, enable_model_summary=False, **options)
        trainer.fit(module, data)


def pooled(module: DeepEnsemble, data: DataModule) -> Split:
    """Outputs of all networks, and targets, of the validation and the test data together."""
    loaders = (data.val_dataloader(), data.test_dataloader()[0])
    batches = [batch for loader in loaders for batch in data.prepared(loader)]
    outputs = torch.cat([module.outputs((x,)) for x, _ in batches], 1)
    return outputs.detach().double(), torch.cat([y for _, y in batches])


def splits(n: int, count: int) -> list[Split]:
    halves = []
    for k in range(count):
        order = torch.randperm(n, generator=keyed_generator("split", k))
        halves.append((order[: n // 2], order[n // 2 :]))
    return halves


def expected(groups: Tensor, new_groups: Tensor, alpha: float) -> float:
    """The exact mean coverage of new examples, given how many calibration examples there are."""
    shares = {}
    for group in new_groups.unique().tolist():
        n = int((groups == group).sum())
        shares[group] = min(1.0, conformal_rank(n, alpha) / (n + 1))
    return sum(shares[g] for g in new_groups.tolist()) / len(new_groups)


def row(name: str, covered: list[float], theory: list[float], size: list[float]) -> list[str]:
    """Mean coverage, what it must be, and how many standard errors lie between."""
    off = torch.tensor(covered).double() - torch.tensor(theory).double()
    error = float(off.std()) / math.sqrt(len(off))
    z = float(off.mean()) / error
    numbers = (sum(covered) / len(covered), sum(theory) / len(theory), error, z)
    verdict = "yes" if abs(z) < 3 else "no"
    return [name, *(f"{v:.4f}" for v in numbers[:3]), f"{z:.1f}", verdict,
            f"{sum(size) / len(size):.3f}"]  # fmt: skip


def classes(probs: Tensor, labels: Tensor, count: int, alpha: float) -> list[list[str]]:
    kinds = {
        "THR": {"score": "thr"},
        "APS": {"score": "aps"},
        "RAPS": {"score": "raps"},
        "THR, by class": {"score": "thr", "by_class": True},
        "APS, by class": {"score": "aps", "by_class": True},
    }
    rows = []
    for name, options in kinds.items():

        def sets(known: Tensor, new: Tensor, k: int, options: dict = options) -> Tensor:
            return conformal_sets(probs[known], labels[known], alpha, seed=k, **options)(probs[new])

        groups = labels if "by_class" in options else torch.zeros_like(labels)
        rows.append(judged(name, sets, labels, groups, count, alpha))
    control = lambda known, new, k: credible_sets(probs[new], alpha)  # noqa: E731
    rows.append(judged("as predicted", control, labels, torch.zeros_like(labels), count, alpha))
    return rows


def judged(
    name: str, sets: Callable, labels: Tensor, groups: Tensor, count: int, alpha: float
) -> list[str]:
    covered, theory, size = [], [], []
    for k, (known, new) in enumerate(splits(len(labels), count)):
        made = sets(known, new, k)
        covered.append(float(M.set_coverage(made, labels[new])))
        theory.append(expected(groups[known], groups[new], alpha))
        size.append(float(M.set_size(made)))
    return row(name, covered, theory, size)


def numbers(
    means: Tensor, stds: Tensor, targets: Tensor, groups: Tensor, count: int, alpha: float
) -> list[list[str]]:
    bands = {"split": mean_band(means, stds), "CQR": quantile_band(means, stds, alpha)}
    rows = []
    for name, band in bands.items():
        for mondrian in (False, True):
            chosen = groups if mondrian else torch.zeros_like(groups)
            covered, theory, width = [], [], []
            for known, new in splits(len(targets), count):
                part, other = (type(band)(*(t[r] for t in band)) for r in (known, new))
                by = chosen if mondrian else None
                rule = conformal_intervals(
                    part, targets[known], alpha, None if by is None else by[known]
                )
                made = rule(other, None if by is None else by[new])
                covered.append(float(made.contain(targets[new]).double().mean()))
                theory.append(expected(chosen[known], chosen[new], alpha))
                width.append(float(made.width.mean()))
            rows.append(row(f"{name}{', by sex' if mondrian else ''}", covered, theory, width))
    low, high, _ = bands["CQR"]
    inside, wide = ((low <= targets) & (targets <= high)).double(), high - low
    halves = [new for _, new in splits(len(targets), count)]
    n = len(targets) // 2
    theory = [conformal_rank(n, alpha) / (n + 1)] * count
    every = (
        [float(inside[r].mean()) for r in halves],
        theory,
        [float(wide[r].mean()) for r in halves],
    )
    return [*rows, row("as predicted", *every)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--splits", type=int, default=200)
    parser.add_argument("--alpha", type=float, default=0.1)
    args = parser.parse_args()
    header = ["", "coverage", "exact", "± (1 s.e.)", "z", "|z| < 3", "mean size"]

    torch.manual_seed(0)
    digits = Digits(val_share=0.35, test_share=0.35)
    adam = lambda p: torch.optim.Adam(p, 5e-3)  # noqa: E731
    ensemble = DeepEnsemble(mlp(64, [32, 32], 10), members=5, optimizer=adam)
    trained(ensemble, digits, 10)
    logits, labels = pooled(ensemble, digits)
    probs = logits.softmax(-1).mean(0)
    accuracy = (probs.argmax(-1) == labels).double().mean()
    print(f"digits: {len(labels)} predictions, accuracy {accuracy:.3f}")
    print(text_table(header, classes(probs, labels, args.splits, args.alpha)))

    diabetes = Diabetes(batch_size=32)
    likelihood = Gaussian("heteroscedastic")
    ensemble = DeepEnsemble(mlp(10, [16], 2), likelihood=likelihood, members=5, optimizer=adam)
    trained(ensemble, diabetes, 40)
    outputs, targets = pooled(ensemble, diabetes)
    means, stds = likelihood.moments(outputs)
    inputs = torch.cat([diabetes.splits.val[0], diabetes.splits.test[0]])
    sex = (inputs[:, 1] > 0).long()
    print(f"\ndiabetes: {len(targets)} predictions")
    given = (means[..., 0], stds[..., 0], targets[:, 0].double(), sex)
    print(text_table(header, numbers(*given, args.splits, args.alpha)))


if __name__ == "__main__":
    main()

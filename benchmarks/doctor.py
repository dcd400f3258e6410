"""How often the doctor's verdicts are right: faults that were put in, and healthy runs.

python benchmarks/doctor.py [--seeds 5] [--only HMC] [--record FILE]

Sensitivity: how many of the runs with a fault get a verdict that names it. False alarms: how many
healthy runs get a fault or a warning. The temperature that `miscalibrated` proposes is tried on
test data that the doctor has not seen, and false if it makes them worse.
"""

import logging
import math
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import lightning as L
import torch
from doctor_cases import FAULTS, HEALTHY, Run
from record import Record, parsed, parser
from torch import Tensor, nn

from lightning_bnn.callbacks import PosteriorDoctor
from lightning_bnn.doctor import Evidence, Examples, Finding, Report
from lightning_bnn.doctor.examine import CHECKS

DRAWS = 20


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--seeds", type=int, default=5)
    made.add_argument("--only", default="", help="cases whose names contain this")
    options = parsed(made)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    record, healthy = Record(options), list[tuple[str, Run, Report]]()
    for name, case in FAULTS.items():
        if options.only in name:
            runs = (case.make(p, seed) for p in case.problems for seed in range(options.seeds))
            found = [bool({*case.verdicts} & examined(run).names()) for run in runs]
            verdict = case.verdicts[0]
            record.value(name, sum(found), what="fault", of=len(found), verdict=verdict)
    for name, run in healthy_runs(options.seeds, options.only):
        healthy.append((name, run, examined(run)))
        alarms = alarms_of(healthy[-1][2])
        print(f"{name:<70}{', '.join(f.name for f in alarms) or 'nothing'}", flush=True)
    for verdict, (looked, found, false) in verdicts(healthy).items():
        record.value(verdict, found, what="healthy", of=looked, false=false)
    record.write()


def healthy_runs(seeds: int, only: str) -> Iterator[tuple[str, Run]]:
    for name, (make, problems) in HEALTHY.items():
        for problem in problems if only in name else ():
            for seed in range(seeds):
                yield f"{name} {problem} {seed}", make(problem, seed)


def examined(run: Run) -> Report:
    """What the doctor says of a run."""
    doctor = PosteriorDoctor()
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            max_epochs=run.epochs, default_root_dir=folder, logger=False, accelerator="cpu",
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            num_sanity_val_steps=0, check_val_every_n_epoch=run.epochs,
            callbacks=[*run.callbacks, doctor],
        )  # fmt: skip
        try:
            trainer.fit(run.module, run.data)
        except Exception as failure:  # which some faults bring about
            print(f"  {type(failure).__name__}: {str(failure)[:90]}")
    return doctor.report


def alarms_of(report: Report) -> list[Finding]:
    return [f for f in report.findings if f.severity != "note"]


def verdicts(runs: Sequence[tuple[str, Run, Report]]) -> dict[str, tuple[int, int, int]]:
    """How many healthy runs each check has seen, in how many it found something, and falsely."""
    counts = {}
    for verdict in CHECKS:
        looked = [r for r in runs if verdict in (*r[2].fine, *r[2].names())]
        found = [(run, f) for _, run, r in looked for f in alarms_of(r) if f.name == verdict]
        false = [f for run, f in found if verdict != "miscalibrated" or gain(f, run) <= 0]
        if looked:
            counts[verdict] = len(looked), len(found), len(false)
    return counts


# ------------------------------------------------------------ temperatures on other data
@torch.no_grad()
def gain(finding: Finding, run: Run) -> float:
    """Nats that test data gain from the temperature that a finding proposes."""
    run.data.setup("test")
    loader, module = run.data.test_dataloader(), run.module
    batches = [
        run.data.on_after_batch_transfer(batch, 0)[:2]
        for batch in (loader[0] if isinstance(loader, list) else loader)
    ]
    x, y = (torch.cat(column) for column in zip(*batches, strict=True))
    modes, predictors = module.posterior().modes(), module.judged_modes(DRAWS)
    evidence = Evidence(
        module.template, module.likelihood, modes, predictors, held_out=Examples((x,), y)
    )
    of_kind = of_classes if evidence.classes else of_numbers
    gains = of_kind(evidence.on_held_out, module.likelihood, y, finding.numbers["temperature"])
    return float(gains.mean())


def of_classes(outputs: list[Tensor], likelihood: nn.Module, y: Tensor, value: float) -> Tensor:
    logits = torch.stack([o.softmax(-1).mean(0) for o in outputs]).mean(0).log()
    gains = (logits / value).log_softmax(-1) - logits
    return gains.gather(-1, y.long()[:, None])


def of_numbers(outputs: list[Tensor], likelihood: Any, y: Tensor, value: float) -> Tensor:
    each = [likelihood.predictive(o) for o in outputs]
    mean = torch.stack([one.mean for one in each]).mean(0)
    second = torch.stack([one.variance + one.mean.square() for one in each]).mean(0)
    scores = (y.double() - mean).square() / (second - mean.square())
    return (scores - scores / value**2) / 2 - math.log(value)


if __name__ == "__main__":
    main()

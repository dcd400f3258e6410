"""How often the doctor's verdicts are right: faults that were put in, and healthy runs.

    python benchmarks/doctor.py --results doctor.json              # resumes where it stopped
    python benchmarks/doctor.py --results doctor.json --table      # only prints
    python benchmarks/doctor.py --results doctor.json --only HMC --seeds 1

Sensitivity: how many of the runs with a fault get one of the verdicts that name it. False alarms:
how many healthy runs get a fault or a warning. That predictions are too sure or too unsure is
checked on test data that the doctor has not seen: it counts as false if what it proposes makes
them worse.
"""

import argparse
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from doctor_cases import FAULTS, HEALTHY, Run
from tqdm.auto import tqdm

from lightning_bnn.callbacks import PosteriorDoctor
from lightning_bnn.callbacks.run_evidence import ExampleStore, evidence_of_module
from lightning_bnn.doctor import CHECKS, Finding, Settings
from lightning_bnn.doctor.checks import predictions

CALIBRATION = ("overconfident", "underconfident")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=Path("doctor_results.json"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--table", action="store_true", help="only print what is known")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    rows = json.loads(options.results.read_text()) if options.results.exists() else {}
    if not options.table:
        wanted = [case for case in cases(options.seeds) if options.only in case[0]]
        for name, make, problem, seed in tqdm([c for c in wanted if c[0] not in rows]):
            rows[name] = outcome(make(problem, seed))
            options.results.write_text(json.dumps(rows, indent=1))
    print(tables(rows))


def cases(seeds: int) -> Iterator[tuple[str, Any, str, int]]:
    """All runs: name, what makes it, problem and seed."""
    for seed in range(seeds):
        for name, case in FAULTS.items():
            for problem in case.problems:
                yield f"fault/{name}/{problem}/{seed}", case.make, problem, seed
        for name, (make, problems) in HEALTHY.items():
            for problem in problems:
                yield f"healthy/{name}/{problem}/{seed}", make, problem, seed


def outcome(run: Run) -> dict[str, Any]:
    """What the doctor says of a run, and how long both take."""
    doctor = PosteriorDoctor()
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            max_epochs=run.epochs, default_root_dir=folder, logger=False, accelerator="cpu",
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            num_sanity_val_steps=0, check_val_every_n_epoch=run.epochs,
            callbacks=[*run.callbacks, doctor],
        )  # fmt: skip
        begun, error = time.process_time(), ""
        try:
            trainer.fit(run.module, run.data)
        except Exception as failure:  # which some faults bring about
            error = f"{type(failure).__name__}: {failure}"
        seconds = time.process_time() - begun
    report = doctor.report
    assert report is not None
    return {
        "found": {f.name: f.severity for f in report.findings},
        "looked": [*report.fine, *report.names()],
        "refuted": [f.name for f in report.findings if refuted(f, run)],
        "seconds": seconds,
        "doctor": doctor.seconds,
        "error": error[:200],
    }


@torch.no_grad()
def refuted(finding: Finding, run: Run) -> bool:
    """Whether test data are predicted worse with the temperature that a finding proposes."""
    if finding.name not in CALIBRATION:
        return False
    run.data.setup("test")
    store, loader = ExampleStore(10_000), run.data.test_dataloader()
    for batch in loader[0] if isinstance(loader, list) else loader:
        store.add(run.module, run.data.on_after_batch_transfer(batch, 0))
    evidence = evidence_of_module(run.module, None, store.examples(), Settings(), {})
    assert evidence.held_out is not None
    outputs, targets = evidence.on_held_out, evidence.held_out.targets
    return predictions.gain_of(evidence, outputs, targets, finding.numbers["temperature"]) <= 0


def tables(rows: dict[str, Any]) -> str:
    """Sensitivity by fault, and false alarms by verdict, in Markdown."""
    lines = ["| what was done | problems | verdict | found |", "|---|---|---|---|"]
    hits = total = 0
    for name, case in FAULTS.items():
        mine = [row for key, row in rows.items() if key.startswith(f"fault/{name}/")]
        found = [bool(set(case.verdicts) & row["found"].keys()) for row in mine]
        named = sorted(v for v in case.verdicts if any(v in row["found"] for row in mine))
        hits, total = hits + sum(found), total + len(found)
        verdicts = ", ".join(v.replace("_", " ") for v in named) or "none"
        lines.append(
            f"| {name} | {', '.join(case.problems)} | {verdicts} | {sum(found)} / {len(found)} |"
        )
    lines += [f"| all | | | {hits} / {total} |", ""]
    healthy = {key: row for key, row in rows.items() if key.startswith("healthy/")}
    lines += ["| verdict | healthy runs looked at | found | false |", "|---|---|---|---|"]
    for verdict in CHECKS:
        looked = [row for row in healthy.values() if verdict in row["looked"]]
        found = [row for row in looked if row["found"].get(verdict) in ("fault", "warning")]
        false = [r for r in found if verdict not in CALIBRATION or verdict in r["refuted"]]
        name = verdict.replace("_", " ")
        lines.append(f"| {name} | {len(looked)} | {len(found)} | {len(false)} |")
    alarmed = [
        key for key, row in healthy.items()
        if any(s == "fault" for s in row["found"].values())
    ]  # fmt: skip
    lines += [
        "",
        f"Healthy runs with a fault: {len(alarmed)} of {len(healthy)}: {', '.join(alarmed)}",
    ]
    shares = sorted(row["doctor"] for row in rows.values())
    if shares:
        lines.append(
            f"Processor seconds of the doctor: {shares[len(shares) // 2]:.2f} in the median, "
            f"{shares[-1]:.2f} at most; of the runs {sum(r['seconds'] for r in rows.values()):.0f}."
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()

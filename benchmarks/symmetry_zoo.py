"""Discovery on one tiny network of every family of timm and transformers, judged from outside.

    python benchmarks/symmetry_zoo.py --results zoo.json           # resumes where it stopped
    python benchmarks/symmetry_zoo.py --results zoo.json --table   # only prints
    python benchmarks/symmetry_zoo.py --results zoo.json --only gpt2 --again

Every network has a process of its own with limits in time and memory. The groups that `discover`
finds in float32 are acted out on numpy arrays by `plain_actions`, in float64, at random weights,
on other inputs, another batch size and another length.
"""

import argparse
import collections
import json
import logging
import math
import multiprocessing
import resource
import time
import traceback
import warnings
import zlib
from pathlib import Path
from typing import Any

import torch
from plain_check import WRONG, check
from torch import nn
from zoo_networks import Network, networks

from weightsym import discover

FIRST = [
    *("timm/vision_transformer", "timm/resnet", "timm/convnext", "timm/efficientnet"),
    *(
        f"hf/{kind}"
        for kind in "bert roberta gpt2 gpt_neox llama mistral qwen2 qwen3 t5 mixtral mamba mamba2 "
        "vit clip whisper bart deberta-v2 gemma2 phi3 falcon bloom opt gptj deepseek_v3 qwen3_moe "
        "gpt_oss olmo2 wav2vec2 swin dinov2 albert electra distilbert mpt glm4 granite rwkv "
        "falcon_mamba jamba gemma3_text qwen3_next convnextv2 resnet segformer deit xlnet".split()
    ),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--which", choices=["all", "timm", "transformers"], default="all")
    parser.add_argument("--only", default="", help="networks whose name contains this")
    parser.add_argument("--again", action="store_true", help="also those that have a result")
    parser.add_argument("--seconds", type=int, default=120, help="of one processor")
    parser.add_argument("--gigabytes", type=float, default=6)
    parser.add_argument("--table", action="store_true", help="print what there is, run nothing")
    options = parser.parse_args()
    results = json.loads(options.results.read_text()) if options.results.exists() else {}
    if not options.table:
        _run_all(options, results)
    print(table(results))


def _run_all(options: Any, results: dict[str, Any]) -> None:
    todo = [
        n
        for n in networks(options.which)
        if options.only in n.name and (options.again or n.name not in results)
    ]
    todo.sort(key=lambda n: (n.name not in FIRST, zlib.crc32(n.name.encode())))  # a sample early
    for number, network in enumerate(todo, 1):
        results[network.name] = _in_a_process(network, options.seconds, options.gigabytes)
        options.results.write_text(json.dumps(results, indent=1))
        print(
            f"[{'#' * (30 * number // len(todo)):<30}] {number}/{len(todo)} "
            f"{network.name}: {verdict(results[network.name])}",
            flush=True,
        )


# ------------------------------------------------------------ one network
def _in_a_process(network: Network, seconds: int, gigabytes: float) -> dict[str, Any]:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_report_to, args=(theirs, network, seconds, gigabytes))
    process.start()
    theirs.close()
    try:
        report = ours.recv() if ours.poll(20 * seconds) else {"failed": "it hangs"}
    except EOFError:
        report = {"failed": f"it ended without a word: more than {seconds} s, or memory"}
    process.kill()
    process.join()
    return report


def _report_to(pipe: Any, network: Network, seconds: int, gigabytes: float) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (int(gigabytes * 2**30),) * 2)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        pipe.send(examine(network))
    except BaseException as error:  # noqa: BLE001  (whatever happens is a result)
        pipe.send({"failed": _words(error)})


def examine(network: Network) -> dict[str, Any]:
    """What `discover` finds in a network, what it costs, and what the check says of it."""
    torch.manual_seed(0)
    try:
        model = network.build().eval()
        example = _that_runs(model, network, 2, 7)
    except Exception as error:  # noqa: BLE001
        return {"not built": _words(error)}
    report: dict[str, Any] = {
        "model": getattr(model, "zoo_name", type(model).__name__),
        "parameters": sum(p.numel() for p in model.parameters()),
        "inputs": {k: list(v.shape) for k, v in example.items()},
    }
    before, start = _peak(), time.process_time()
    try:
        symmetries = discover(model, **example)
    except Exception as error:  # noqa: BLE001
        return {**report, "crash": _words(error), "trace": traceback.format_exc()[-1500:]}
    report |= {"seconds": time.process_time() - start, "peak MB": (_peak() - before) / 1024}
    report |= _found(symmetries)
    others = [_that_runs(model, network, 3, 5), _that_runs(model, network, 1, 9)]
    try:
        report |= check(model, symmetries, others)
    except Exception:  # noqa: BLE001
        report["check failed"] = traceback.format_exc()[-1500:]
    return report


def _that_runs(model: nn.Module, network: Network, batch: int, length: int) -> dict[str, Any]:
    """The first inputs that the network takes, else those of the example's size."""
    errors = []
    for size in ((batch, length), (2, 7)):
        for inputs in network.inputs(model, *size):
            try:
                with torch.no_grad():
                    model(**inputs)
                return inputs
            except Exception as error:  # noqa: BLE001
                errors.append(error)
    raise errors[0] if errors else LookupError("no inputs are known for its forward")


def _found(symmetries: Any) -> dict[str, Any]:
    kinds = collections.Counter(g.kind for g in symmetries.permutations)
    return {
        "groups": len(symmetries.permutations),
        "block groups": kinds["block"],
        "log10": round(symmetries.log10_permutations, 1),
        "scales": symmetries.scaling_dof,
        "signs": symmetries.sign_dof,
        "matrices": len(getattr(symmetries, "linear", ())),
        "dimension": getattr(symmetries, "dimension", symmetries.scaling_dof),
        "frozen": [str(f) for f in symmetries.frozen],
        "unchecked by discover": symmetries.unchecked,
        "evaluation only": symmetries.evaluation_only,
        "own error": symmetries.error if math.isfinite(symmetries.error) else None,
    }


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:600]


# ------------------------------------------------------------ table
def verdict(report: dict[str, Any]) -> str:
    """One line on what was found, or why there is no result."""
    for key in ("not built", "failed", "crash", "check failed"):
        if key in report:
            return f"{key}: {report[key].strip().splitlines()[-1][:110]}"
    if report["wrong"]:
        return f"WRONG: {len(report['wrong'])} groups, {report['wrong'][0]['name']}"
    if largest_error(report) > WRONG:
        return f"WRONG together: {largest_error(report):.0e}"
    counts = ", ".join(f"{report[kind]} {kind}" for kind in ("groups", "scales", "signs"))
    checked = f"error {largest_error(report):.0e}" if report["errors"] else "not checked"
    return f"{counts}, {len(report['frozen'])} frozen, {checked}, {report['seconds']:.1f} s"


def largest_error(report: dict[str, Any]) -> float:
    return max(report.get("errors", {}).values(), default=-1.0)


def table(results: dict[str, Any]) -> str:
    """One line per network, then counts, and the reasons for what is frozen by frequency."""
    lines = [f"{name:<36}{verdict(report)}" for name, report in results.items()]
    examined = [report for report in results.values() if "groups" in report]
    failures = [k for r in results.values() for k in ("not built", "failed", "crash") if k in r]
    outcomes = {
        **collections.Counter(failures),
        "examined": len(examined),
        "checked": sum(bool(r.get("errors")) for r in examined),
        "wrong": sum(largest_error(r) > WRONG for r in examined),
        "controls": sum("control" in r for r in examined),
        "controls not seen": sum(r.get("control", math.inf) < WRONG for r in examined),
        "empty": sum(not (r["groups"] or r["scales"] or r["signs"]) for r in examined),
    }
    reasons = collections.Counter(
        reason for r in examined for reason in {frozen.partition(": ")[2] for frozen in r["frozen"]}
    )
    lines += ["", ", ".join(f"{k}: {v}" for k, v in outcomes.items()), "", "networks with frozen:"]
    lines += [f"{count:>5}  {reason}" for reason, count in reasons.most_common(40)]
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

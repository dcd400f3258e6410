"""What peft makes of two adapters that are added, beside `weightsym adapters`.

python benchmarks/adapters.py

The truth is a base that takes up both, each of which peft itself confirms (`merge_and_unload`).
"""

import contextlib
import io
import sys
import tempfile
import warnings
from pathlib import Path

import peft
from record import parsed, parser

from weightsym.cli import main

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / part) for part in ("commands", "support")]
import test_merged_adapters as cases  # noqa: E402

warnings.filterwarnings("ignore")
SHARES = [1.5, -0.5]


def error(network, wanted):
    return f"{float((cases.outputs(network) - wanted).abs().max() / wanted.abs().max()):.1e}"


def by_peft(name, paths, kind):
    """Outputs of the adapter that peft makes of both, or its refusal."""
    model = peft.PeftModel.from_pretrained(cases.KINDS[name][0](), paths[0], adapter_name="a")
    model.load_adapter(paths[1], "b")
    model.add_weighted_adapter(["a", "b"], SHARES, "sum", combination_type=kind)
    model.set_adapter("sum")
    return model.eval()


def row(name, folder):
    form, paths, _ = cases.saved(name, folder, 1, 2)
    whole, both = folder / ("w" if form.is_dir() else "w.safetensors"), folder / "both"
    words = ["adapters", *paths, "--weights", *map(str, SHARES)]
    with contextlib.redirect_stdout(io.StringIO()):
        main([*words, "--base", str(form), "--out", str(whole)])
        wanted = cases.outputs(cases.loaded(name, whole))
        cells = ["exact with `--base`"]
        if "dora" not in name:
            main([*words, "--out", str(both)])
            cells = [error(cases.with_adapter(name, both), wanted)]
        for kind in ("cat", "linear"):
            try:
                cells.append(error(by_peft(name, paths, kind), wanted))
            except ValueError:
                cells.append("refused")
    return cells


if __name__ == "__main__":
    parsed(parser(__doc__))
    for each in cases.KINDS:
        with tempfile.TemporaryDirectory() as place:
            print(f"| {' | '.join([each, *row(each, Path(place))])} |", flush=True)

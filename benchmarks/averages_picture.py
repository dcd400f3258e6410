"""The picture of averages, from what `averages.py across` and `federated_averages.py` have written.

python benchmarks/averages_picture.py --results FOLDER --out docs/averages.png
"""

import argparse
import json
import statistics
from pathlib import Path

import torch

from lightning_bnn.plots import Line, lines_figure

ACROSS = {"one network": "single", "plain average": "plain", "in one frame": "ours"}
CLIENTS = {"plain average": "plain", "in one frame": "ours"}
STARTS = {"common": "one start", "different": "own starts"}


def curve(rows, place, value):
    """Means by place: of a number of runs, or of a round."""
    x = sorted({row[place] for row in rows})
    means = [statistics.mean(row[value] for row in rows if row[place] == k) for k in x]
    return Line(torch.tensor(x, dtype=torch.float64), torch.tensor(means, dtype=torch.float64))


def across(rows):
    """Averages of several runs: one panel for each kind of network."""
    return {
        network: {
            text: curve([r for r in rows if r["network"] == network], "count", how)
            for text, how in ACROSS.items()
        }
        for network in dict.fromkeys(row["network"] for row in rows)
    }


def federated(rows):
    """Averages of ten clients: one panel for each way to begin, and for each mix of classes."""

    def of(alpha, start, how):
        wanted = (rows[0]["set"], alpha, start, how)
        return [r for r in rows if (r["set"], r["alpha"], r["start"], r["how"]) == wanted]

    return {
        f"clients, {words}, mix {alpha:g}": {
            text: curve(of(alpha, start, how), "round", "accuracy") for text, how in CLIENTS.items()
        }
        for start, words in STARTS.items()
        for alpha in (0.1, 1.0)
    }


def picture(options):
    one, other = (
        json.loads((options.results / f"{n}.json").read_text()) for n in ("across", "federated")
    )
    panels = {**across(one), **federated(other)}
    figure = lines_figure(panels, ("round", "accuracy, %"))
    for ax, title in zip(figure.axes, panels, strict=False):
        ax.set(ylim=(0, 103), xlabel="round" if title.startswith("clients") else "runs")
    figure.savefig(options.out, dpi=150)


def main():
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--results", type=Path, required=True)
    made.add_argument("--out", type=Path, default=Path("averages.png"))
    picture(made.parse_args())


if __name__ == "__main__":
    main()

"""The picture of averages, from what `averages.py across` and `federated_averages.py` have written.

python benchmarks/averages_picture.py --results FOLDER --out docs/averages.png
"""

import argparse
import json
import statistics
from pathlib import Path

from matplotlib.figure import Figure


def picture(options):
    across_rows, rows = (
        json.loads((options.results / f"{n}.json").read_text()) for n in ("across", "federated")
    )
    figure = Figure((10, 3.2), layout="constrained")
    axes = figure.subplots(1, 4, width_ratios=(1, 1, 1.2, 1.2))
    colours = {"single": "0.5", "plain": "tab:red", "ours": "tab:blue"}
    for ax, name in zip(axes, dict.fromkeys(r["network"] for r in across_rows), strict=False):
        for how, colour in colours.items():
            some = [r for r in across_rows if r["network"] == name]
            counts = sorted({r["count"] for r in some})
            values = [[r[how] for r in some if r["count"] == c] for c in counts]
            means = [statistics.mean(v) for v in values]
            label = {"single": "one network", "plain": "plain average", "ours": "in one frame"}[how]
            ax.plot(range(len(counts)), means, "o-", color=colour, label=label)
        ax.set(title=name, xlabel="runs", ylim=(0, 100))
        ax.set_xticks(range(len(counts)), counts)
    axes[0].set_ylabel("accuracy of the average, %")
    axes[0].legend(fontsize=7)
    for ax, start in zip(axes[2:], ("common", "different"), strict=True):
        for alpha, style in ((0.1, "--"), (1.0, "-")):
            for how in ("plain", "ours"):
                some = [r for r in rows if (r["set"], r["alpha"], r["start"], r["how"])
                        == (rows[0]["set"], alpha, start, how)]  # fmt: skip
                numbers = sorted({r["round"] for r in some})
                means = [
                    statistics.mean(r["accuracy"] for r in some if r["round"] == n) for n in numbers
                ]
                name = {"plain": "FedAvg", "ours": "in one frame"}[how]
                label = f"{name}, mix {alpha:g}"
                width = 4 if how == "plain" else 1.5  # both are seen where they are the same
                ax.plot(numbers, means, style, color=colours[how], lw=width, label=label)
        ax.set(title=f"ten clients, {start} start", xlabel="round", ylim=(0, 100))
    axes[2].legend(fontsize=7, loc="lower right")
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

"""How the pages show what was measured: for every file its rows as a table."""

from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]
Table = list[list[str]]
LAYOUTS: dict[str, Callable[[list[Row]], Table]] = {}


def layout(*names: str) -> Callable[[Callable[[list[Row]], Table]], Callable[[list[Row]], Table]]:
    """Enter a function as the layout of the files of these names; without any, of its own."""

    def enter(function: Callable[[list[Row]], Table]) -> Callable[[list[Row]], Table]:
        for name in names or (function.__name__,):
            LAYOUTS[name] = function
        return function

    return enter


# ------------------------------------------------------------ numbers
def pick(rows: Sequence[Row], **labels: Any) -> Row:
    """The one row with these labels."""
    found = [r for r in rows if all(r.get(k) == v for k, v in labels.items())]
    if len(found) != 1:
        raise KeyError(f"{len(found)} rows of {labels}")
    return found[0]


def seconds(row: Row) -> float:
    """The median of the clock that counts."""
    return float(row[row["clock"]][1])


def shown(value: float) -> str:
    """A time in the unit that it has."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if value * factor >= 1 or (unit == "s" and value >= 0.5):
            return f"{digits(value * factor)} {unit}"
    return f"{digits(value * 1e6)} µs"


def digits(value: float) -> str:
    """Two digits, and all of those before the point."""
    if value >= 10:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def thousands(value: int) -> str:
    """A whole number in groups of three digits."""
    return f"{value:,}".replace(",", " ")


def time(rows: Sequence[Row], **labels: Any) -> str:
    return shown(seconds(pick(rows, **labels)))


def over(theirs: Row, ours: Row) -> str:
    """How many times as long."""
    ratio = seconds(theirs) / seconds(ours)
    return f"{ratio:.0f} x" if ratio >= 20 else f"{ratio:.1f} x" if ratio >= 3 else f"{ratio:.2f} x"


def value(rows: Sequence[Row], who: str, **labels: Any) -> Any:
    return pick(rows, who=who, **labels)["value"]


def every(rows: Sequence[Row], label: str) -> list[Any]:
    """The values of a label, in order."""
    return list(dict.fromkeys(row[label] for row in rows if label in row))


# ------------------------------------------------------------ symmetry
@layout()
def symmetry_discovery(rows: list[Row]) -> Table:
    goals = {"resnet18": "1.5 s", "densenet121": "5 s"}
    table = [
        [
            "`discover` at 224 px, check included",
            "time",
            "first call",
            "error of random elements",
            "goal",
        ]
    ]
    for name in every(rows, "network"):
        cells = (time(rows, network=name, who=who) for who in ("discover", "first call"))
        error = f"{value(rows, 'error', network=name):.0e}"
        table.append([name, *cells, error, goals[name]])
    return table


@layout()
def symmetry_masses(rows: list[Row]) -> Table:
    ours, theirs = (pick(rows, problem="MLP", who=who) for who in ("balancing", "cvxpy"))
    gap, difference = value(rows, "certified gap"), value(rows, "difference")
    table = [["`min_mass`", "time", "goal"]]
    table += [[f"{value(rows, 'weights')} weights of an MLP", shown(seconds(ours)), ""]]
    table += [["the same with cvxpy, one exponential per weight", shown(seconds(theirs)), ""]]
    table += [["cvxpy / balancing", over(theirs, ours), "1000 x"]]
    table += [["certified gap; difference to cvxpy", f"{gap:.0e}; {difference:.0e}", "1e-8"]]
    for kind, what, goal in (("carrier", "", "10 ms"), ("eval", "coupled ", "450 ms")):
        problem = f"ResNet-18, {kind}"
        scales = f"{value(rows, 'scales', problem=problem)} {what}scales"
        name = f'ResNet-18, `batch_norm="{kind}"` ({scales})'
        table.append([name, time(rows, problem=problem, who="balancing"), goal])
    return [*table, ["1000 OptuNets", time(rows, problem="1000 OptuNets"), "20 ms"]]


@layout()
def discovery(rows: list[Row]) -> Table:
    head = ["peak of memory", "/ bytes", "CPU s", "CPU s a million parameters"]
    table = [["`discover`", "parameters", "their bytes", *head]]
    goals = ["goal", "", "", "", "3 x", "", "0.1"]
    for network in every(rows, "network"):
        names = ("parameters", "bytes", "peak", "seconds")
        numbers, size, peak, taken = (value(rows, who, network=network) for who in names)
        cells = [f"{numbers / 1e6:.1f} million", f"{size / 2**20:.0f} MiB"]
        cells += [f"{peak / 2**20:.0f} MiB", f"{peak / size:.1f} x", f"{taken:.1f}"]
        table.append([network, *cells, digits(taken / numbers * 1e6)])
    return [*table, goals]


@layout()
def symmetry_removal(rows: list[Row]) -> Table:
    ways = ("sorting", "normalising", "balancing", "cvxpy")
    table = [["weights", *ways, "cvxpy / balancing"]]
    for weights in every(rows, "weights"):
        own = {row["who"]: row for row in rows if row["weights"] == weights}
        cells = [shown(seconds(own[way])) if way in own else "" for way in ways]
        ratio = over(own["cvxpy"], own["balancing"]) if "cvxpy" in own else ""
        table.append([thousands(weights), *cells, ratio])
    return table


@layout()
def symmetry_matching(rows: list[Row]) -> Table:
    theirs, tensors = pick(rows, who="rebasin"), value(rows, "tensors")
    table = [["planted permutation + 50 % noise, ResNet-18", "time", "recovered", "rebasin / ours"]]
    for method, name in (("best", "`match`"), ("ascent", '`match(..., method="ascent")`')):
        ours, right = pick(rows, who=method), value(rows, "recovered", method=method)
        cells = [shown(seconds(ours)), f"{right} of {tensors} tensors", over(theirs, ours)]
        table.append([name, *cells])
    return [*table, ["rebasin 0.0.47", shown(seconds(theirs)), "", ""]]


# ------------------------------------------------------------ metrics
@layout()
def metrics_mmd(rows: list[Row]) -> Table:
    names = {
        "mmd_table": "`mmd_table`",
        "one more method": "one more method against the same `MMDReference`",
        "scipy": "scipy: distances once, 20 numpy kernels (float64)",
        "torchdrift": "torchdrift 0.1: 20 calls (Laplace kernel of the L2 norm, with diagonal)",
    }
    ours = pick(rows, who="mmd_table")
    table = [["what", "time", "ratio"]]
    for who, name in names.items():
        row = pick(rows, who=who)
        table.append([name, shown(seconds(row)), over(row, ours)])
    first, error = time(rows, who="first call"), value(rows, "error")
    table.append(["first call in a process, with compilation", first, ""])
    return [*table, ["largest error against float64, of the largest value", f"{error:.0e}", ""]]


@layout()
def metrics_batches(rows: list[Row]) -> Table:
    sizes = every(rows, "batch")
    table = [["metric", "peer", *sizes]]
    for metric in every(rows, "metric"):
        of = [row for row in rows if row["metric"] == metric]
        for who in [who for who in every(of, "who") if who != "ours"]:
            pairs = [[pick(of, batch=size, who=w) for w in (who, "ours")] for size in sizes]
            table.append([metric, who, *(over(*pair) for pair in pairs)])
    return table


# ------------------------------------------------------------ callbacks and banks
@layout()
def callbacks_steps(rows: list[Row]) -> Table:
    step = seconds(pick(rows, who="step"))
    table = [["callback", "time at work", "share of a step"]]
    for row in rows:
        if row["who"] != "step":
            when = "every step" if row["every"] == 1 else f"every {row['every']} steps"
            share = f"{100 * seconds(row) / row['every'] / step:.2f} %"
            table.append([f"`{row['who']}`, {when}", shown(seconds(row)), share])
    return [*table, ["(the step itself)", shown(step), ""]]


@layout()
def callbacks_bank(rows: list[Row]) -> Table:
    columns = f"100 000 columns of the largest layer of {value(rows, 'networks')} networks"
    names = {
        "write": ("write", "`torch.save`"),
        "read one": ("read one network", "`torch.load`"),
        "columns of all": (columns, "`torch.load(mmap=True)`"),
    }
    table = [["what", "bank", "one file per checkpoint", "ratio"]]
    for what, (name, how) in names.items():
        ours, theirs = (pick(rows, what=what, who=who) for who in ("bank", "files"))
        cells = [shown(seconds(ours)), f"{how} {shown(seconds(theirs))}", over(theirs, ours)]
        table.append([name, *cells])
    for what, name in (("append", "appended one by one"), ("one layer", "one layer")):
        taken = time(rows, what=f"1000 OptuNets, {what}")
        table.append([f"1000 OptuNets, {name}", taken, "", ""])
    return table


# ------------------------------------------------------------ stacks
@layout()
def apply(rows: list[Row]) -> Table:
    head = ["predict", "vmap", "loop", "gradient", "vmap", "loop"]
    table = [["network", "weights", "members", "chosen", *head]]
    for network in every(rows, "network"):
        of = [row for row in rows if row["network"] == network]
        cells = []
        for what in ("predict", "gradient"):
            ours, *others = (pick(of, what=what, who=who) for who in ("chosen", "vmap", "loop"))
            cells += [shown(seconds(ours)), *(over(other, ours) for other in others)]
        members, chosen = str(of[0]["members"]), of[0]["chosen"]
        table.append([network, thousands(of[0]["weights"]), members, chosen, *cells])
    return table


@layout()
def population(rows: list[Row]) -> Table:
    """Of one step of one member."""
    names = every(rows, "who")
    table = [["", "members", *names]]
    for network in every(rows, "network"):
        found = [pick(rows, network=network, who=who) for who in names]
        cells = [shown(seconds(row) / row["steps"]) for row in found]
        table.append([network, thousands(found[0]["members"]), *cells])
    return table


@layout()
def own_batches(rows: list[Row]) -> Table:
    table = [["batches", "a step of a member", "/ shared"]]
    return table + [[r["who"], shown(seconds(r) / r["steps"]), over(r, rows[0])] for r in rows]


# ------------------------------------------------------------ samplers
@layout("samplers_steps", "samplers_steps_resnet")
def samplers(rows: list[Row]) -> Table:
    networks = {"mlp": "784-512-512-10", "resnet": "ResNet-18"}
    table = [[networks[rows[0]["network"]], "time", "ratio"]]
    return table + [[row["who"], shown(seconds(row)), over(row, rows[0])] for row in rows]


@layout()
def samplers_chains(rows: list[Row]) -> Table:
    head = ["8 runs", "8 chains", "ratio"]
    table = [["", "weights", *(f"{loop}: {h}" for loop in ("bare", "`Trainer.fit`") for h in head)]]
    for network in every(rows, "network"):
        cells = []
        for loop in ("bare", "Trainer.fit"):
            pair = [
                pick(rows, network=network, loop=loop, who=who) for who in ("8 runs", "8 chains")
            ]
            cells += [*(shown(seconds(row) / row["steps"]) for row in pair), over(*pair)]
        weights = pick(rows, network=network, loop="bare", who="8 runs")["weights"]
        table.append([network, thousands(weights), *cells])
    return table


# ------------------------------------------------------------ variational inference
@layout("vi_steps", "vi_steps_resnet_fused")
def vi_steps(rows: list[Row]) -> Table:
    plain, ours = (pick(rows, who=who) for who in ("deterministic", "MFVI"))
    table = [["", "time", "/ deterministic", "/ `MFVI`"]]
    return table + [[r["who"], shown(seconds(r)), over(r, plain), over(r, ours)] for r in rows]


@layout()
def vi_predict(rows: list[Row]) -> Table:
    table = [["network", "weights", "loop", "`Posterior.predictor`", "ratio"]]
    for network in every(rows, "network"):
        loop, ours = (pick(rows, network=network, who=who) for who in ("loop", "ours"))
        scale, weights = 1000 / ours["samples"], thousands(ours["weights"])
        times = (shown(scale * seconds(row)) for row in (loop, ours))
        table.append([network, weights, *times, over(loop, ours)])
    return table


# ------------------------------------------------------------ ratios
@layout()
def ratios(rows: list[Row]) -> Table:
    table = [["name", "ours; theirs", "theirs / ours"]]
    return table + [[f"`{r['who']}`", r["said"], f"{r['value']:.3g}"] for r in rows]

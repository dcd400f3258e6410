"""How the pages show what was measured: for every file its rows as a table."""

import math
import statistics
from collections.abc import Callable, Sequence
from statistics import mean, stdev
from typing import Any

Row = dict[str, Any]
Table = list[list[str]]
LAYOUTS: dict[str, Callable[[list[Row]], Table]] = {}


def layout(function: Callable[[list[Row]], Table]) -> Callable[[list[Row]], Table]:
    """Enter a function as the layout of the file of its name."""
    LAYOUTS[function.__name__] = function
    return function


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
@layout
def symmetry_masses(rows: list[Row]) -> Table:
    ours, theirs = (pick(rows, problem="MLP", who=who) for who in ("balancing", "cvxpy"))
    gap, difference = value(rows, "certified gap"), value(rows, "difference")
    table = [["`min_mass`", "time"]]
    table += [[f"{value(rows, 'weights')} weights of an MLP", shown(seconds(ours))]]
    table += [["the same with cvxpy, one exponential per weight", shown(seconds(theirs))]]
    table += [["certified gap; difference to cvxpy", f"{gap:.0e}; {difference:.0e}"]]
    for kind, what in (("carrier", ""), ("eval", "coupled ")):
        problem = f"ResNet-18, {kind}"
        scales = f"{value(rows, 'scales', problem=problem)} {what}scales"
        name = f'ResNet-18, `batch_norm="{kind}"` ({scales})'
        table.append([name, time(rows, problem=problem, who="balancing")])
    return [*table, ["1000 OptuNets", time(rows, problem="1000 OptuNets")]]


@layout
def discovery(rows: list[Row]) -> Table:
    head = ["peak of memory", "/ bytes", "CPU s", "CPU s a million parameters"]
    table = [["`discover`", "parameters", *head]]
    for network in every(rows, "network"):
        names = ("parameters", "bytes", "peak", "seconds")
        numbers, size, peak, taken = (value(rows, who, network=network) for who in names)
        cells = [f"{numbers / 1e6:.1f} million", f"{peak / 2**20:.0f} MiB"]
        cells += [f"{peak / size:.1f} x", f"{taken:.1f}"]
        table.append([network, *cells, digits(taken / numbers * 1e6)])
    return table


@layout
def differences(rows: list[Row]) -> Table:
    """The same of pairs that are related, or independent."""
    return checkpoints(rows)


@layout
def checkpoints(rows: list[Row]) -> Table:
    """Time and memory of each command by shape, and their slopes in the number of parameters."""
    sizes = sorted({(row["parameters"], row["shape"]) for row in rows})
    table = [["CPU s, peak of memory", *(shape for _, shape in sizes), "slopes"]]
    for command in every(rows, "command"):
        mine = [row for row in rows if row["command"] == command]
        cells, points = list[str](), list[tuple[float, float, float]]()
        for size, shape in sizes:
            numbers = [float(row["value"]) for row in mine if row["shape"] == shape]
            cells.append(f"{digits(numbers[0])} s, {numbers[1] / 1e3:.1f} GB" if numbers else "-")
            points += [(size, *numbers)] if numbers else []
        sizes_of, *ways = zip(*points, strict=True)
        slopes = [slope(sizes_of, way) for way in ways] if len(points) > 1 else []
        table.append([f"`{command}`", *cells, ", ".join(slopes)])
    return table


def slope(sizes: Sequence[float], numbers: Sequence[float]) -> str:
    """The exponent of a power law."""
    logs = ([math.log(number) for number in column] for column in (sizes, numbers))
    return f"{statistics.linear_regression(*logs).slope:.2f}"


@layout
def growth(rows: list[Row]) -> Table:
    table = [["one thread", "grows with", "up to", "slope", "arithmetic"]]
    for who, size in dict.fromkeys((row["who"], row["size"]) for row in rows):
        mine = [row for row in rows if (row["who"], row["size"]) == (who, size)]
        end = f"{thousands(mine[-1]['number'])}: {shown(mine[-1]['value'])}"
        exponent = slope([row["number"] for row in mine], [row["value"] for row in mine])
        table.append([who, size, end, exponent, str(mine[0]["limit"])])
    return table


@layout
def symmetry_matching(rows: list[Row]) -> Table:
    theirs, tensors = pick(rows, who="rebasin"), value(rows, "tensors")
    table = [["planted permutation + 50 % noise, ResNet-18", "time", "recovered", "rebasin / ours"]]
    for method, name in (("best", "`match`"), ("ascent", '`match(..., method="ascent")`')):
        ours, right = pick(rows, who=method), value(rows, "recovered", method=method)
        cells = [shown(seconds(ours)), f"{right} of {tensors} tensors", over(theirs, ours)]
        table.append([name, *cells])
    return [*table, ["rebasin 0.0.47", shown(seconds(theirs)), "", ""]]


# ------------------------------------------------------------ callbacks
@layout
def callbacks_steps(rows: list[Row]) -> Table:
    step = seconds(pick(rows, who="step"))
    table = [["callback", "time at work", "share of a step"]]
    for row in rows:
        if row["who"] != "step":
            when = "every step" if row["every"] == 1 else f"every {row['every']} steps"
            share = f"{100 * seconds(row) / row['every'] / step:.2f} %"
            table.append([f"`{row['who']}`, {when}", shown(seconds(row)), share])
    return [*table, ["(the step itself)", shown(step), ""]]


# ------------------------------------------------------------ stacks
@layout
def population(rows: list[Row]) -> Table:
    """Of one step of one member."""
    names = every(rows, "who")
    table = [["", "members", *names]]
    for network in every(rows, "network"):
        found = [pick(rows, network=network, who=who) for who in names]
        cells = [shown(seconds(row) / row["steps"]) for row in found]
        table.append([network, thousands(found[0]["members"]), *cells])
    return table


@layout
def gpu_populations(rows: list[Row]) -> Table:
    """Thousands of steps of networks per second, of few and of many networks."""
    names = {
        "ours, in a Trainer": "a Trainer", "ours": "without one", "ours, graph": "all as a graph",
        "torch.func": "`torch.func`", "torch.func, graph": "that as a graph",
        "torch.func, compiled, graph": "and compiled", "JAX, scan": "JAX, in a scan",
    }  # fmt: skip
    columns = [(network, n) for network in every(rows, "network") for n in (100, 10_000)]
    titles = [f"{network.split()[0].strip(',')}, {thousands(n)}" for network, n in columns]
    table = [["", *titles]]
    for who, name in names.items():
        labels = [{"network": network, "members": n, "who": who} for network, n in columns]
        table.append([name, *(_rate(rows, "steps", **label) for label in labels)])
    return table


def _rate(rows: Sequence[Row], what: str, **labels: Any) -> str:
    row = pick(rows, **labels) if any(_has(r, labels) for r in rows) else {}
    if what not in row:
        return "-"
    return digits(float(f"{row[what] / seconds(row) / 1000:.2g}"))


def _has(row: Row, labels: Row) -> bool:
    return all(row.get(name) == value for name, value in labels.items())


# ------------------------------------------------------------ samplers
@layout
def samplers_steps(rows: list[Row]) -> Table:
    table = [["784-512-512-10", "time", "ratio"]]
    return table + [[row["who"], shown(seconds(row)), over(row, rows[0])] for row in rows]


@layout
def samplers_chains(rows: list[Row]) -> Table:
    names = ("µs a gradient", "draws in 1000 gradients", "draws a CPU second")
    table = [["yacht, four chains", *names]]
    for who in every(rows, "who"):
        numbers = (value(rows, who, what=name.replace("µ", "u")) for name in names)
        table.append([who, *(digits(number) for number in numbers)])
    return table


# ------------------------------------------------------------ variational inference
@layout
def vi_steps(rows: list[Row]) -> Table:
    plain, ours = (pick(rows, who=who) for who in ("deterministic", "MFVI"))
    table = [["", "time", "/ deterministic", "/ `MFVI`"]]
    for row in rows:
        time = shown(seconds(row) / row.get("steps", 1))
        table.append([row["who"], time, over(row, plain), over(row, ours)])
    return table


# ------------------------------------------------------------ ratios
@layout
def distil(rows: list[Row]) -> Table:
    """One row for each way to predict."""
    numbers = {
        "accuracy": "acc", "NLL": "nll", "NLL, tempered": "nll_t",
        "AUROC": "mutual_information", "cost": "ms",
    }  # fmt: skip
    return _over_seeds(rows, "predicts", numbers)


@layout
def bayesian_adapters(rows: list[Row]) -> Table:
    numbers = {
        "accuracy": "acc", "NLL": "nll", "NLL, tempered": "nll_t", "NLL, shifted": "nll_shift",
    }  # fmt: skip
    return _over_seeds(rows, "posterior", numbers)


def _over_seeds(rows: list[Row], title: str, numbers: dict[str, str]) -> Table:
    """Means over seeds and their errors, and the least cost."""
    table = [[title, *numbers]]
    for who in every(rows, "who"):
        cells = []
        for number in numbers.values():
            found = [r["value"] for r in rows if r["who"] == who and r["number"] == number]
            if number == "ms":
                cells.append(f"{min(found):.0f} ms")
            elif not found:
                cells.append("")
            else:
                error = stdev(found) / len(found) ** 0.5 if len(found) > 1 else 0.0
                cells.append(f"{mean(found):.3f} ± {error:.3f}")
        table.append([who, *cells])
    return table


@layout
def ratios(rows: list[Row]) -> Table:
    return [["ours; theirs", "theirs / ours"], *([r["said"], f"{r['value']:.3g}"] for r in rows)]


@layout
def costs(rows: list[Row]) -> Table:
    table, plain = [["what", "cost"]], pick(rows, who="plain adapters")
    for row in rows:
        if row["what"] == "step":
            table.append([f"a step: {row['who']}", over(row, plain)])
        elif row["what"] != "import":
            table.append([f"memory: {row['who']}", f"{row['value']:.0f} {row['what']}"])
    imports = [f"{r['who']} {r['value']:.2g}" for r in rows if r["what"] == "import"]
    return [*table, ["CPU s of an import", ", ".join(imports)]]


# ------------------------------------------------------------ doctor
@layout
def doctor(rows: list[Row]) -> Table:
    table = [["verdict", "faults put in, found", "healthy runs examined", "alarms", "not true"]]
    faults, healthy = ([r for r in rows if r["what"] == w] for w in ("fault", "healthy"))
    others = 0
    for verdict in dict.fromkeys([*every(faults, "verdict"), *every(healthy, "who")]):
        mine = [row for row in faults if row["verdict"] == verdict]
        put, found = (sum(row[key] for row in mine) for key in ("of", "value"))
        seen = [row for row in healthy if row["who"] == verdict]
        if put == found and not any(row["value"] for row in seen):
            others += 1
            continue
        cells = [f"{found} of {put}" if put else ""]
        cells += [str(seen[0][key]) if seen else "" for key in ("of", "value", "false")]
        table.append([verdict.replace("_", " "), *cells])
    table.append([f"{others} others", "all", "", "0", "0"])
    put, found = (sum(row[key] for row in faults) for key in ("of", "value"))
    return [*table, ["all", f"{found} of {put}", "", "", ""]]


# ------------------------------------------------------------ intervals
@layout
def intervals(rows: list[Row]) -> Table:
    """Methods beside each other on every table."""
    names = every(rows, "table")
    table = [["90 % intervals", *names]]
    for who in every(rows, "who"):
        found = (_measured(rows, name, who) for name in names)
        table.append([who, *(f"{f['cover']} ({f['conditional']}), {f['width']}" for f in found)])
    return table


@layout
def intervals_splits(rows: list[Row]) -> Table:
    """One method on many tables."""
    titles = {"cover": "coverage", "conditional": "conditional", "width": "width", "R2": "R²"}
    table = [["90 % intervals", *titles.values(), "CPU s"]]
    for name in every(rows, "table"):
        found = _measured(rows, name, rows[0]["who"])
        table.append([name, *(found[key] for key in titles), found["seconds"]])
    return table


def _measured(rows: list[Row], name: str, who: str) -> dict[str, str]:
    mine = [row for row in rows if (row["table"], row["who"]) == (name, who)]
    found = {row["what"]: row["value"] for row in mine}
    return {
        "cover": f"{100 * found['coverage']:.1f} ± {100 * found['error']:.1f}",
        "conditional": f"{100 * found['conditional']:.1f}",
        "width": f"{found['width']:.2f}",
        "R2": f"{found['R2']:.2f}",
        "seconds": f"{found['seconds']:.2g}",
    }

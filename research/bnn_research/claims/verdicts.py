"""The claims of the papers from `claims.yaml`, and verdicts from numbers.

Numbers are read from the tables of studies by table, row and column, with their uncertainty.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from string import Template
from typing import Any

import yaml

from lightning_bnn.evaluation.compare import COLUMNS


class Missing(Exception):
    """Numbers of a claim are missing, with the reason."""


@dataclass(frozen=True)
class Number:
    """A number of a study.

    Attributes:
        values: one per seed.
        sd: displayed deviation of their mean; NaN if there is none.
        doubt: half the width of its 95 % interval; 0 if unknown, so that the number alone decides.
    """

    values: Sequence[float | int]
    sd: float | int = math.nan
    doubt: float | int = 0.0

    @property
    def value(self) -> float:
        """Mean over all seeds."""
        return math.fsum(self.values) / len(self.values)

    def __str__(self) -> str:
        error = f" ± {self.sd:.2g}" if math.isfinite(self.sd) else ""
        return f"{self.value:.4g}{error}"


Numbers = Mapping[str, Number]
"""Numbers by the text of the wildcards in their row and column; "" without wildcards."""


def over_seeds(values: Sequence[float | int]) -> Number:
    """Return the mean of repetitions, with Student's interval.

    Args:
        values: one for each repetition.

    >>> str(over_seeds([1.0, 2.0, 3.0]))
    '2 ± 1'
    """
    number = Number(values)
    if len(values) == 1:
        return number
    squares = math.fsum((v - number.value) ** 2 for v in values)
    return with_error(values, math.sqrt(squares / (len(values) - 1)), len(values))


def with_error(values: Sequence[float | int], sd: float | int, count: int | None = None) -> Number:
    """Return a number with a known spread.

    Args:
        values: one for each repetition.
        sd: deviation of the averaged values, or a standard error.
        count: number of averaged values; None if ``sd`` is a standard error.
    """
    from scipy.stats import t

    if not math.isfinite(sd) or count == 1:
        return Number(values, sd)
    width = 1.96 if count is None else float(t.ppf(0.975, count - 1)) / math.sqrt(count)
    return Number(values, sd, width * sd)


@dataclass(frozen=True)
class Evidence:
    """Results of steps.

    Attributes:
        results: content of ``results.json`` of each study, one per seed, by step; comparisons with
            their rows.
        absent: reasons why other steps have none.
    """

    results: Mapping[str, Sequence[Mapping[str, Any]]]
    absent: Mapping[str, str] = field(default_factory=dict)

    def of(self, step: str) -> Sequence[Mapping[str, Any]]:
        """Return the results of a step, one per seed."""
        if not self.results.get(step):
            raise Missing(self.absent.get(step, f"`{step}` has not been run"))
        return self.results[step]

    def setting(self, step: str, path: str) -> Any:
        """Return a setting of a step by its dotted name."""
        value: Any = self.of(step)[0]["settings"]
        for name in path.split("."):
            value = value[name]
        return value

    def read(
        self, step: str, table: str, row: str | Sequence[str], column: str, count: int | None = None
    ) -> Numbers:
        """Return numbers of a table.

        Args:
            step: name of the step.
            table: its name; ``one`` and ``multi`` are the posteriors of a comparison by method and
                number, and ``floor`` is the noise of an equal number of networks.
            row: its first cells, with ``*``, or ``* but X``, for several rows.
            column: its heading, ``*`` for all after the first, ``first *`` or ``last *``.
            count: number of averaged values behind the table's error, if that is their deviation.
        """
        if table in ("one", "multi", "floor"):
            return self._posteriors(step, table, str(row), column)
        tables = [result["tables"].get(table) for result in self.of(step)]
        if None in tables:
            raise Missing(f"the results of `{step}` have no table {table!r}")
        patterns = [row] if isinstance(row, str) else row
        header = [str(name).strip() for name in tables[0]["header"]]
        columns = {"*": range(1, len(header)), "first *": [1], "last *": [len(header) - 1]}.get(
            column, [k for k, name in enumerate(header) if name == column]
        )
        numbers: dict[str, Number] = {}
        by_name = [{_first(r, len(patterns)): r for r in seed["rows"]} for seed in tables]
        for name in by_name[0]:
            if all(map(_matches, name, patterns)) and all(name in rows for rows in by_name):
                free = [n for n, p in zip(name, patterns, strict=True) if "*" in p]
                for k in columns:
                    key = ", ".join([*free, header[k]] if column == "*" else free)
                    cells = [rows[name][k] for rows in by_name]
                    if not isinstance(cells[0], str):
                        numbers[key] = _number(cells, count)
        if not numbers:
            where = f"row {', '.join(patterns)!r} and column {column!r}"
            raise Missing(f"{table!r} of `{step}` has no number in {where}")
        return numbers

    def _posteriors(self, step: str, mode: str, method: str, name: str) -> Numbers:
        numbers: dict[str, Number] = {}
        for row in self.of(step)[0].get("rows", ()):
            in_mode = row["mode"] == ("multi" if mode == "floor" else mode)
            if not (in_mode and name in row["numbers"] and _matches(row["method"], method)):
                continue
            key = row["method"] if "*" in method else ""
            if mode == "floor":
                floor = ("Noise floor", f"{row['pooled']} networks")
                (cell,) = self.read(step, "table1", floor, COLUMNS[name].title).values()
                numbers[key] = Number([cell.value / 100], cell.sd / 100, cell.doubt / 100)
                continue
            value, error = map(_float, row["numbers"][name])
            numbers[key] = with_error([value], error, row["seeds"] if mode == "one" else None)
        if not numbers:
            raise Missing(f"the rows of `{step}` have no number {name!r} of {method}, {mode} mode")
        return numbers


def _matches(text: str, pattern: str) -> bool:
    pattern, _, excluded = pattern.partition(" but ")
    return text != excluded and pattern in ("*", text)


def _first(cells: Sequence[Any], count: int) -> tuple[str, ...]:
    return tuple(str(cell).strip() for cell in cells[:count])


def _number(cells: Sequence[Any], count: int | None) -> Number:
    """Return a cell of every seed. A single seed has the error of the table."""
    values = [_float(cell["value"] if isinstance(cell, Mapping) else cell) for cell in cells]
    if len(cells) == 1 and isinstance(cells[0], Mapping):
        return with_error(values, _float(cells[0]["error"]), count)
    return over_seeds(values)


def _float(value: float | int | None) -> float:
    return math.nan if value is None else float(value)


Answer = bool | None
"""True, False, or None if within the errors."""


@dataclass(frozen=True)
class Claim:
    """A row of the table of claims, which explains the fields.

    Attributes:
        name: of the row, after that of the paper.
        section: section of the page.
        row: all other fields.
    """

    name: str
    section: str
    row: Mapping[str, Any]

    @property
    def text(self) -> str:
        """The claim in a sentence."""
        return str(self.row["claim"])


@dataclass(frozen=True)
class Judged:
    """A claim with its verdict.

    Attributes:
        claim: the claim.
        ours: the numbers of the studies.
        verdict: holds, partly, does not hold, within the errors, or the reason for no test.
        checks: the criteria in words, with their results.
    """

    claim: Claim
    ours: str
    verdict: str
    checks: Mapping[str, Answer]


def judged(claim: Claim, evidence: Evidence) -> Judged:
    """Judge a claim by the available studies or distances.

    Args:
        claim: of a paper.
        evidence: results of the studies.
    """
    texts: list[str] = []
    checks: dict[str, Answer] = {}
    reason = ""
    for names in claim.row.get("each", [{}]):
        entry = _filled(claim.row, names)
        try:
            numbers, answers = _part(evidence, entry)
        except Missing as missing:
            if evidence.results.get(entry["study"]) and not entry.get("optional"):
                return Judged(claim, "", f"not tested: {missing}", {})
            reason = reason or str(missing)
            continue
        checks |= answers
        texts.append(", ".join(_shown(n, x) for n, x in numbers.items() if not n.startswith("_")))
    if not checks:
        return Judged(claim, "", f"not tested: {reason}", {})
    return Judged(claim, "; ".join(texts), verdict_of(checks), checks)


def verdict_of(checks: Mapping[str, Answer]) -> str:
    """Return the verdict that follows from all criteria.

    Args:
        checks: every criterion in words, with its result; None is within the errors.

    >>> verdict_of({"larger": True}), verdict_of({"larger": True, "significant": None})
    ('holds', 'partly (within the errors: significant)')
    """
    answers = set(checks.values())
    if len(answers) == 1:
        whole = {True: "holds", False: "does not hold", None: "undecided: within the errors"}
        return whole[answers.pop()]
    unmet = [f"not: {text}" for text, met in checks.items() if met is False]
    unclear = [f"within the errors: {text}" for text, met in checks.items() if met is None]
    return f"partly ({'; '.join(unmet + unclear)})"


# ------------------------------------------------------------ relations
def _above(x: Number, y: Number) -> Answer:
    """Check whether one number exceeds another beyond the uncertainty of their difference."""
    difference, doubt = x.value - y.value, math.hypot(x.doubt, y.doubt)
    return True if difference > doubt else False if difference <= -doubt else None


def _at_least(x: Number, y: Number) -> Answer:
    smaller = _above(y, x)
    return None if smaller is None else not smaller


def _within(x: Number, low: Number, high: Number) -> Answer:
    least, most = x.value - x.doubt, x.value + x.doubt
    if low.value <= least and most <= high.value:
        return True
    return False if most < low.value or least > high.value else None


def _near(x: Number, wanted: Number, tolerance: Number) -> Answer:
    ends = wanted.value - tolerance.value, wanted.value + tolerance.value
    return _within(x, *(Number([end]) for end in ends))


def _agrees(x: Number, low: Number, high: Number) -> Answer:
    """Check whether a number may lie between two others, for claims of no effect."""
    if not math.isfinite(x.value):
        return None
    return low.value - low.doubt - x.doubt <= x.value <= high.value + high.doubt + x.doubt


RELATIONS: Mapping[str, Callable[..., Answer]] = {
    "above": _above,
    "below": lambda x, y: _above(y, x),
    "at_least": _at_least,
    "at_most": lambda x, y: _at_least(y, x),
    "within": _within,
    "near": _near,
    "agrees": _agrees,
}
"""Relations by their names in the table of claims."""


def answer(
    relation: str, rows: Sequence[Sequence[Numbers]], by: str = "number", some: bool = False
) -> Answer:
    """Check whether a relation holds between numbers, for all rows and columns or for some.

    Args:
        relation: its name.
        rows: operands; each row of them must meet the relation.
        by: basis of the comparison: ``"number"``, beyond its uncertainty; ``"mean"``, the number
            alone; ``"seeds"``, the mean beyond the uncertainty over seeds; ``"again"``, the number,
            as an equal number of further seeds would decide; ``"run"``, every run, within the
            errors if only some meet it; ``"all"``, every run, not met if one fails.
        some: whether one row or column suffices.
    """
    answers = [
        _compared(RELATIONS[relation], numbers, by)
        for operands in rows
        for numbers in _paired(*operands).values()
    ]
    if some in answers:  # one yes is enough for some, one no for all
        return some
    return None if None in answers else not some


def _compared(relation: Callable[..., Answer], numbers: Sequence[Number], by: str) -> Answer:
    if by == "number":
        return relation(*numbers)
    if by == "again":  # two means differ by the doubt about both
        return relation(*(replace(x, doubt=math.sqrt(2) * x.doubt) for x in numbers))
    if by == "mean":
        return relation(*(Number([x.value]) for x in numbers)) is True
    if by == "seeds":
        return relation(*(over_seeds(x.values) for x in numbers))
    runs = [k for k, v in enumerate(numbers[0].values) if by == "all" or math.isfinite(v)]
    met = {relation(*(Number([_of_run(x, k)]) for x in numbers)) is True for k in runs}
    if by == "all":
        return False not in met
    return met.pop() if len(met) == 1 else None


def _of_run(x: Number, run: int) -> float:
    """Return a number with the same value in all runs."""
    return x.values[run] if len(x.values) > 1 else x.values[0]


def _paired(*operands: Numbers) -> dict[str, tuple[Number, ...]]:
    """Pair numbers with the same key. One without a key is paired with every other."""
    keyed = [x for x in operands if "" not in x] or operands[:1]
    keys = [k for k in keyed[0] if all(k in x for x in keyed)]
    if not keys:
        raise Missing("no row or column has all compared numbers")
    return {k: tuple(x[""] if "" in x else x[k] for x in operands) for k in keys}


# ------------------------------------------------------------ derived numbers
def _difference(x: Number, y: Number) -> Number:
    """Subtract seed by seed, with independent errors."""
    runs = range(max(len(x.values), len(y.values)))
    values = [_of_run(x, k) - _of_run(y, k) for k in runs]
    return Number(values, math.hypot(x.sd, y.sd), math.hypot(x.doubt, y.doubt))


def _minus(x: Numbers, y: Numbers) -> Numbers:
    return {key: _difference(*pair) for key, pair in _paired(x, y).items()}


def _ratio(x: Numbers, y: Numbers) -> Numbers:
    return {
        key: over_seeds([v / w if w else math.nan for v, w in zip(a.values, b.values, strict=True)])
        for key, (a, b) in _paired(x, y).items()
    }


def _linear(x: Numbers, factor: Numbers, shift: Numbers) -> Numbers:
    by, plus = factor[""].value, shift[""].value
    return {
        key: Number([by * v + plus for v in q.values], abs(by) * q.sd, abs(by) * q.doubt)
        for key, q in x.items()
    }


def _rises(x: Numbers) -> Numbers:
    """Return the rise from each row to the next."""
    return {b: _difference(x[b], x[a]) for a, b in itertools.pairwise(x)}


def _extreme(choose: Callable[..., Any], x: Numbers) -> Numbers:
    """Return the extreme of all rows, seed by seed."""
    chosen = choose(x.values(), key=lambda q: q.value)
    if len(chosen.values) == 1:
        return {"": chosen}
    seeds = zip(*(q.values for q in x.values()), strict=True)
    return {"": over_seeds([choose(row) for row in seeds])}


def _where_least(x: Numbers, by: Numbers) -> Numbers:
    """Return the number of the row in which another number is least."""
    return {"": x[min(by, key=lambda key: by[key].value)]}


def _row(x: Numbers, position: Numbers) -> Numbers:
    """Return one row by its index, or by the share of the rows before it."""
    where, rows = position[""].value, [*x.values()]
    k = int(where) if where == int(where) else int(where * (len(rows) - 1) + 1e-9)
    if not -len(rows) <= k < len(rows):
        raise Missing(f"there are only {len(rows)} rows")
    return {"": rows[k]}


def _names(x: Numbers) -> Numbers:
    """Return the text of the wildcard as a number."""
    return {key: Number([float(key)] * len(q.values)) for key, q in x.items()}


def _rank_correlation(x: Numbers) -> Numbers:
    """Return Spearman's correlation of the numbers with the names of their rows, in every seed."""
    from scipy.stats import spearmanr

    names, seeds = [float(key) for key in x], zip(*(q.values for q in x.values()), strict=True)
    return {"": over_seeds([float(spearmanr(names, values).statistic) for values in seeds])}


def _bonferroni(x: Numbers) -> Numbers:
    """Return the least p of all rows and seeds times their number, or NaN if a test has none."""
    values = [v for q in x.values() for v in q.values]
    least = math.nan if any(map(math.isnan, values)) else min(values) * len(values)
    return {"": Number([least])}


def _finite(x: Numbers) -> Numbers:
    """Return the existing numbers, since a grid may not reach all."""
    finite = {key: [v for v in q.values if math.isfinite(v)] for key, q in x.items()}
    if not any(finite.values()):
        raise Missing("there is no number in any row")
    return {key: over_seeds(values) for key, values in finite.items() if values}


DERIVED: Mapping[str, Callable[..., Numbers]] = {
    "minus": _minus,
    "ratio": _ratio,
    "linear": _linear,
    "rises": _rises,
    "least": lambda x: _extreme(min, x),
    "most": lambda x: _extreme(max, x),
    "where least": _where_least,
    "row": _row,
    "names": _names,
    "rank correlation": _rank_correlation,
    "finite": _finite,
    "bonferroni": _bonferroni,
}
"""Numbers derived from those that claims read, by the names that the table of claims uses."""


# ------------------------------------------------------------ rows of the table
def _part(e: Evidence, entry: Mapping[str, Any]) -> tuple[dict[str, Numbers], dict[str, Answer]]:
    """Return the numbers of a row, and its criteria with their results."""
    study, numbers = entry["study"], dict[str, Numbers]()
    count = e.setting(study, entry["count"]) if e.of(study) and "count" in entry else None
    for name, source in entry["numbers"].items():
        if isinstance(source, list):
            table, row, column = source
            numbers[name] = e.read(study, table, row, column, count)
        elif isinstance(source, Mapping) and "setting" in source:
            numbers[name] = _constant(e.setting(study, source["setting"]))
        elif isinstance(source, Mapping):
            ((derived, operands),) = source.items()
            arguments = (_operand(operand, numbers) for operand in _listed(operands))
            numbers[name] = DERIVED[derived](*arguments)
        else:
            numbers[name] = _constant(source)
    return numbers, {text: _met(check, numbers) for text, check in entry["checks"].items()}


def _met(check: Mapping[str, Any], numbers: Mapping[str, Numbers]) -> Answer:
    """Evaluate a relation, pairing lists one by one and single operands with each of a list."""
    relation = next(iter(check))
    columns = [_listed(operand) for operand in check[relation]]
    count = max(map(len, columns))
    columns = [column * count if len(column) == 1 else column for column in columns]
    rows = [[_operand(operand, numbers) for operand in row] for row in zip(*columns, strict=True)]
    return answer(relation, rows, check.get("by", "number"), check.get("some", False))


def _filled(value: Any, names: Mapping[str, Any]) -> Any:
    """Fill in the `$names` of a row."""
    if isinstance(value, str):
        whole = names.get(value.removeprefix("$")) if value.startswith("$") else None
        return Template(value).safe_substitute(names) if whole is None else whole
    if isinstance(value, Mapping):
        filled = {_filled(key, names): entry for key, entry in value.items() if key != "each"}
        return {key: _filled(entry, names) for key, entry in filled.items()}
    return [_filled(entry, names) for entry in value] if isinstance(value, list) else value


def _operand(operand: Any, numbers: Mapping[str, Numbers]) -> Numbers:
    return numbers[operand] if isinstance(operand, str) else _constant(operand)


def _constant(value: Any) -> Numbers:
    return {"": Number([float(value)])}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _shown(name: str, numbers: Numbers) -> str:
    texts = [f"{key}: {q}".removeprefix(": ") for key, q in numbers.items()]
    joined = "; ".join(texts)
    return f"{name} {joined}" if len(texts) == 1 else f"{name} ({joined})"


def _claims() -> dict[str, list[Claim]]:
    text = resources.files(__package__).joinpath("claims.yaml").read_text(encoding="utf-8")
    return {
        paper: [
            Claim(f"{paper}.{name}", section, row)
            for section, rows in sections.items()
            for name, row in rows.items()
        ]
        for paper, sections in yaml.safe_load(text).items()
    }


CLAIMS: Mapping[str, Sequence[Claim]] = _claims()
"""By paper, in the order of its page."""

"""The claims of all papers, read from the table `claims.yaml`."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from importlib import resources
from string import Template
from typing import Any

import yaml

from lightning_bnn.studies.claims.claim import Claim, Judgement
from lightning_bnn.studies.claims.derived import DERIVED
from lightning_bnn.studies.claims.evidence import Evidence, Missing, Quantities, Quantity
from lightning_bnn.studies.claims.functions import FUNCTIONS
from lightning_bnn.studies.claims.numbers import Answer, Number
from lightning_bnn.studies.claims.relations import BY, RELATIONS, answer

__all__ = ["CLAIMS", "claims_in", "filled"]

_FIELDS = {
    "claim", "paper", "study", "each", "optional", "count", "numbers", "checks", "function", "with",
}  # fmt: skip


def claims_in(text: str) -> dict[str, list[Claim]]:
    """The claims of a table, by paper.

    Args:
        text: YAML; the head of `claims.yaml` says what is in it.
    """
    return {
        paper: [
            _claim(f"{paper}.{name}", section, row)
            for section, rows in sections.items()
            for name, row in rows.items()
        ]
        for paper, sections in yaml.safe_load(text).items()
    }


def _claim(name: str, section: str, row: Mapping[str, Any]) -> Claim:
    unknown = [field for field in row if field not in _FIELDS]
    lacking = [field for field in ("claim", "paper") if field not in row]
    if unknown or lacking:
        fields = ", ".join(sorted(_FIELDS))
        raise ValueError(f"`{name}` must have claim and paper, of {fields}, got {', '.join(row)}.")
    if "function" in row:
        _known(name, "function", row["function"], FUNCTIONS)
        options = {"study": row["study"], **row.get("with", {})}
        judge = functools.partial(FUNCTIONS[row["function"]], **options)
    else:
        parts = [filled(row, names) for names in row.get("each", [{}])]
        for part in parts:
            _check_part(name, part)
        judge = functools.partial(_judged, parts=parts)
    return Claim(section, row["claim"], row["paper"], judge, name)


def filled(value: Any, names: Mapping[str, Any]) -> Any:
    """Everything in a row, with what stands for its `$names`.

    Args:
        value: a row, or a part of one.
        names: one of its `each`.
    """
    if isinstance(value, str):
        whole = names.get(value.removeprefix("$")) if value.startswith("$") else None
        return Template(value).safe_substitute(names) if whole is None else whole
    if isinstance(value, Mapping):
        return {
            filled(key, names): filled(part, names) for key, part in value.items() if key != "each"
        }
    return [filled(part, names) for part in value] if isinstance(value, list) else value


# ------------------------------------------------------------ what is refused
def _check_part(name: str, part: Mapping[str, Any]) -> None:
    """Refuse a row that cannot be judged, before there are results."""
    for field in ("study", "numbers", "checks"):
        if not part.get(field):
            raise ValueError(f"`{name}` must have {field}, got none.")
    known: list[str] = []
    for number, source in part["numbers"].items():
        if isinstance(source, Mapping) and "setting" not in source:
            ((how, operands),) = source.items()
            _known(name, "a derived number", how, DERIVED)
            _operands(name, number, _listed(operands), DERIVED[how][1], known)
        elif isinstance(source, list) and len(source) != 3:
            raise ValueError(f"`{name}`: {number} must have table, row and column, got {source}.")
        known.append(number)
    for text, check in part["checks"].items():
        relation = next(iter(check))
        _known(name, "a relation", relation, RELATIONS)
        _known(name, "`by`", check.get("by", "number"), BY)
        _operands(name, text, check[relation], RELATIONS[relation][1], known)


def _known(name: str, what: str, found: Any, known: Mapping[Any, Any]) -> None:
    if found not in known:
        raise ValueError(f"`{name}`: {what} must be one of {', '.join(known)}, got {found!r}.")


def _operands(name: str, of: str, operands: Sequence[Any], count: int, known: list[str]) -> None:
    if len(operands) != count:
        raise ValueError(f"`{name}`: {of} must have {count} operands, got {len(operands)}.")
    for one in (part for operand in operands for part in _listed(operand)):
        if isinstance(one, str):
            _known(name, of, one, dict.fromkeys(known))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


# ------------------------------------------------------------ what the numbers say
def _judged(e: Evidence, parts: Sequence[Mapping[str, Any]]) -> Judgement:
    """A claim about several studies or distances is judged by those that there are."""
    here: list[str] = []
    checks: dict[str, Answer] = {}
    absent: list[Missing] = []
    for part in parts:
        try:
            found = _numbers(e, part)
            checks |= {text: _met(check, found) for text, check in part["checks"].items()}
        except Missing as reason:
            if e.results.get(part["study"]) and not part.get("optional"):
                raise
            absent.append(reason)
            continue
        shown = [f"{n} {_shown(q)}" for n, q in found.items() if not n.startswith("_")]
        here.append(", ".join(shown))
    if not checks:
        raise absent[0]
    return Judgement("; ".join(here), checks)


def _numbers(e: Evidence, part: Mapping[str, Any]) -> dict[str, Quantities]:
    study, found = part["study"], dict[str, Quantities]()
    e.of(study)
    count = e.setting(study, part["count"]) if "count" in part else None
    for name, source in part["numbers"].items():
        if isinstance(source, list):
            table, row, column = source
            found[name] = e.read(study, table, row, column, count)
            continue
        if not isinstance(source, Mapping):
            found[name] = _constant(float(source))
            continue
        ((how, given),) = source.items()
        if how == "setting":
            found[name] = _constant(float(e.setting(study, given)))
        else:
            found[name] = DERIVED[how][0](*(_operand(one, found) for one in _listed(given)))
    return found


def _met(check: Mapping[str, Any], found: Mapping[str, Quantities]) -> Answer:
    """Operands that are lists go together one by one. A single one goes with each of a list."""
    relation = next(iter(check))
    columns = [_listed(operand) for operand in check[relation]]
    count = max(map(len, columns))
    columns = [column * count if len(column) == 1 else column for column in columns]
    rows = [[_operand(one, found) for one in row] for row in zip(*columns, strict=True)]
    return answer(relation, rows, check.get("by", "number"), check.get("some", False))


def _operand(one: Any, found: Mapping[str, Quantities]) -> Quantities:
    return found[one] if isinstance(one, str) else _constant(float(one))


def _constant(value: float) -> Quantities:
    return {"": Quantity([value], Number(value))}


def _shown(quantities: Quantities) -> str:
    texts = []
    for key, q in quantities.items():
        spread = f" ± {q.number.sd:.2g}" if q.number.sd == q.number.sd else ""
        texts.append(f"{key}: {q.number.value:.4g}{spread}".removeprefix(": "))
    return texts[0] if len(texts) == 1 else f"({'; '.join(texts)})"


CLAIMS: Mapping[str, Sequence[Claim]] = claims_in(
    resources.files(__package__).joinpath("claims.yaml").read_text(encoding="utf-8")
)
"""By paper, in the order of its page."""

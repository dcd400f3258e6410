"""A claim of a paper: what it says, what decides it, and the verdict that follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lightning_bnn.studies.claims.evidence import Evidence, Missing
from lightning_bnn.studies.claims.numbers import Answer

__all__ = ["Claim", "Judged", "Judgement", "judged", "verdict_of"]


@dataclass(frozen=True)
class Judgement:
    """The numbers about a claim, and its criteria.

    Attributes:
        here: the numbers, for people to read.
        checks: every criterion in words, and whether the numbers meet it.
    """

    here: str
    checks: Mapping[str, Answer]


@dataclass(frozen=True)
class Claim:
    """Something that a paper says.

    Attributes:
        section: of the page that it belongs to.
        text: the claim.
        paper: the paper's own number or word.
        judge: what the results of studies say about it; a pure function.
        name: of its row in the table, after that of the paper.
    """

    section: str
    text: str
    paper: str
    judge: Callable[[Evidence], Judgement]
    name: str


@dataclass(frozen=True)
class Judged:
    """A claim with its verdict.

    Attributes:
        claim: what was judged.
        here: the numbers of the studies.
        verdict: holds, partly, does not hold, within the errors, or why it was not tested.
        checks: what decided it.
    """

    claim: Claim
    here: str
    verdict: str
    checks: Mapping[str, Answer]


def judged(claim: Claim, evidence: Evidence) -> Judged:
    """The verdict of the numbers about a claim.

    Args:
        claim: of a paper.
        evidence: results of the studies.
    """
    try:
        judgement = claim.judge(evidence)
    except Missing as reason:
        return Judged(claim, "", f"not tested: {reason}", {})
    verdict = verdict_of(judgement.checks)
    return Judged(claim, judgement.here, verdict, judgement.checks)


def verdict_of(checks: Mapping[str, Answer]) -> str:
    """The verdict that follows from all criteria together.

    Args:
        checks: every criterion in words, and whether it is met; None is within the errors.

    >>> verdict_of({"larger": True}), verdict_of({"larger": True, "significant": None})
    ('holds', 'partly (within the errors: significant)')
    """
    if not checks:
        raise ValueError("`checks` must hold one criterion at least, got none.")
    checks = {text: None if met is None else bool(met) for text, met in checks.items()}
    answers = set(checks.values())
    if answers == {True}:
        return "holds"
    if answers == {False}:
        return "does not hold"
    if answers == {None}:
        return "undecided: within the errors"
    unmet = [f"not: {text}" for text, met in checks.items() if met is False]
    open_ = [f"within the errors: {text}" for text, met in checks.items() if met is None]
    return f"partly ({'; '.join(unmet + open_)})"

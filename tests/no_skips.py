"""Where packages of others are there to be tested, a test that is skipped has failed."""

import os

__all__ = ["VARIABLE", "unskipped"]

VARIABLE = "LIGHTNING_BNN_NO_SKIPS"


def unskipped(report):
    """The report of a test; with `LIGHTNING_BNN_NO_SKIPS=1`, a failure in place of a skip."""
    expected_to_fail = hasattr(report, "wasxfail")
    if report.skipped and not expected_to_fail and os.environ.get(VARIABLE) == "1":
        report.outcome = "failed"
        report.longrepr = f"Nothing may be skipped here ({VARIABLE}=1): {report.longrepr}"
    return report

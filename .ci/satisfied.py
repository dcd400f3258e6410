"""Whether all that an installed package requires is installed, too, in a version that it allows.

    python .ci/satisfied.py lightning_bnn data fast

Of extras, those that are named count. Exit code 1, and a line for each requirement that is not met.
"""

import sys
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement


def unmet(requirements, extras):
    """What is missing, or there in another version, in words."""
    for requirement in map(Requirement, requirements):
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": e}) for e in ("", *extras)):
            continue
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            yield f"{requirement}: not installed"
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            yield f"{requirement}: {found} is installed"


if __name__ == "__main__":
    stated = requires(sys.argv[1]) or []
    problems = list(unmet(stated, sys.argv[2:]))
    print(*problems, sep="\n") if problems else print(f"{len(stated)} requirements are met")
    sys.exit(bool(problems) or not stated)

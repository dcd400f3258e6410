"""Link what a package requires, directly or not, into another environment, and nothing besides.

    python .ci/linked.py weightsym SITE

SITE is the folder of packages there. The package and all that it requires must be installed where
this runs; extras count if a requirement names them.
"""

import sys
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement


def required(name, extras=(), resolved=None):
    """The names of all distributions that one requires, each with the extras that are asked for."""
    resolved = {} if resolved is None else resolved
    for requirement in map(Requirement, distribution(name).requires or ()):
        marker, asked = requirement.marker, frozenset(requirement.extras)
        counts = marker is None or any(marker.evaluate({"extra": e}) for e in ("", *extras))
        if counts and (requirement.name not in resolved or not asked <= resolved[requirement.name]):
            resolved[requirement.name] = asked | resolved.get(requirement.name, frozenset())
            required(requirement.name, resolved[requirement.name], resolved)
    return resolved


def places(name):
    """The folders and files of a distribution."""
    files = distribution(name).files
    assert files is not None, f"{name} does not say what its files are"
    tops = {file.parts[0] for file in files} - {"..", "__pycache__"}
    return {Path(distribution(name).locate_file(top)) for top in tops}


if __name__ == "__main__":
    every = sorted(required(sys.argv[1]))
    for place in set().union(*map(places, every)):  # all are known before the first is linked
        (Path(sys.argv[2]) / place.name).symlink_to(place)
    print(f"{sys.argv[1]} requires {len(every)} packages: {', '.join(every)}")

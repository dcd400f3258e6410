"""Pictures of the pages, made again by the commands in `website/pictures.yaml`.

python benchmarks/pictures.py                   which there are, and the minutes they take
python benchmarks/pictures.py toy.png diff.png    these, into docs/

Pages that print numbers of the same run are not changed: compare them.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
PICTURES = yaml.safe_load((ROOT / "website/pictures.yaml").read_text(encoding="utf-8"))


def make(name: str, folder: Path) -> Path:
    """Run a picture's commands in a folder, and say where the picture is."""
    script = re.sub(r"^python ", f"python {ROOT}/", PICTURES[name]["command"], flags=re.MULTILINE)
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PATH": programs}
    command = ["bash", "-euo", "pipefail", "-c", script]
    subprocess.run(command, cwd=folder, env=environment, check=True)
    pattern = PICTURES[name].get("file", name)
    found = sorted(folder.glob(pattern))
    if not found:
        raise SystemExit(f"The commands of {name} have left no {pattern}.")
    return found[-1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    names = parser.parse_args().names
    if unknown := sorted({*names} - {*PICTURES}):
        parser.error(f"there is no {unknown[0]}; the pictures are {', '.join(PICTURES)}")
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(make(name, Path(folder)), ROOT / "docs" / name)
            print(f"docs/{name}")
    if not names:
        for name, about in PICTURES.items():
            needs = f"   needs {about['needs']}" if "needs" in about else ""
            print(f"{name:24s}{about['minutes']:7g} min{needs}")


if __name__ == "__main__":
    main()

"""What the site has beside `docs/`: start page, reference and gallery, made when it is built."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
REFERENCE = {
    "symmetry": "Symmetries",
    "callbacks": "Callbacks",
    "doctor": "The doctor",
    "modules": "LightningModules",
    "methods": "Methods, without Lightning",
    "posteriors": "Posteriors",
    "likelihoods": "Likelihoods and priors",
    "samplers": "Samplers",
    "metrics": "Metrics",
    "calibration": "Calibration",
    "params": "Networks as dicts and stacks",
    "bank": "Banks",
    "weight_files": "Weights in files",
    "datamodules": "Data",
    "models": "The papers' networks",
    "references": "Sampled posteriors",
    "strategies": "Strategies",
    "judging": "Judging predictions",
    "engines": "Engines",
    "plots": "Figures",
    "randomness": "Keyed random numbers",
}
"""Public modules, and the titles of their pages."""
WHOLE = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
"""Pages that are files of the repository."""
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")


def public_names(module: str) -> list[str]:
    """The names in ``__all__`` of a module of the package, read without importing it.

    Args:
        module: below `lightning_bnn`.
    """
    folder = ROOT / "lightning_bnn" / module
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return sorted(ast.literal_eval(node.value), key=str.lower)
    raise ValueError(f"{file} has no __all__.")


def reference_page(module: str) -> str:
    """The page of a module: every public name with its signature and docstring.

    Args:
        module: below `lightning_bnn`.
    """
    names = "\n\n".join(f"::: lightning_bnn.{module}.{name}" for name in public_names(module))
    return f"# {REFERENCE[module]}\n\n`from lightning_bnn.{module} import ...`\n\n{names}\n"


def commands() -> dict[str, str]:
    """The functions behind the commands of the console script, except those of Lightning."""
    folders = {"COMMANDS": "commands", "REFERENCES": "studies", "STUDIES": "studies"}
    found = {}
    for node in ast.parse((ROOT / "lightning_bnn/cli.py").read_text(encoding="utf-8")).body:
        table = getattr(node.targets[0], "id", "") if isinstance(node, ast.Assign) else ""
        if isinstance(node, ast.Assign) and table in folders:
            for name in ast.literal_eval(node.value):
                found[name] = f"lightning_bnn.{folders[table]}.{name}.{name}"
    return found


def commands_page() -> str:
    """Every command with its arguments, which are those of a function."""
    how = "`lightning-bnn COMMAND --help` shows the same, and which arguments are options."
    functions = "\n\n".join(f"::: {function}" for function in commands().values())
    return f"# Commands\n\n{how}\n\n{functions}\n"


def gallery_page() -> str:
    """Every picture of the pages, with its caption and the page that explains it."""
    made = yaml.safe_load((ROOT / "website/pictures.yaml").read_text(encoding="utf-8"))
    parts = ["# Gallery\n\nEvery picture, the page that says what it shows, and what makes it.\n"]
    for page in sorted((ROOT / "docs").glob("**/*.md")):
        name = page.relative_to(ROOT / "docs").as_posix()
        title = page.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        for caption, picture in re.findall(r"!\[([^\]]*)\]\((\S+\.png)\)", page.read_text("utf-8")):
            place = (Path(name).parent / picture).as_posix()
            parts.append(f"![{caption}]({place})\n\n{caption} ([{title}]({name}))\n")
            if picture in made:
                parts.append(f"```console\n{made[picture]['command'].strip()}\n```\n")
    return "\n".join(parts)


def site_link(target: str, page: str) -> str:
    """Where a link of a page leads on the site.

    Files of the repository that are no pages are named by their path, without a link.

    >>> site_link("docs/p1.md", "index.md"), site_link("../README.md#start", "tour.md")
    ('p1.md', 'index.md#start')
    >>> site_link("../examples/plain_loop.py", "tour.md")
    ''
    """
    if "://" in target or target.startswith("#"):
        return target
    path, _, anchor = target.partition("#")
    of_repository = page in WHOLE
    place = (Path() if of_repository else Path("docs") / Path(page).parent) / path
    parts: list[str] = []
    for part in place.parts:
        parts = parts[:-1] if part == ".." else [*parts, part]
    whole = {source: name for name, source in WHOLE.items()}
    resolved = "/".join(parts)
    if resolved in whole:
        found = whole[resolved]
    elif parts[:1] == ["docs"]:
        found = "/".join(parts[1:])
    else:
        return ""
    up = "../" * (0 if of_repository else len(Path(page).parent.parts))
    return f"{up}{found}{'#' + anchor if anchor else ''}"


def with_site_links(text: str, page: str) -> str:
    """A page whose links lead to pages of the site.

    Args:
        text: Markdown.
        page: its name on the site.
    """

    def linked(match: re.Match[str]) -> str:
        target = site_link(match[2], page)
        return f"[{match[1]}]({target})" if target else match[1]

    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    shown = [p if p.startswith("```") else _LINK.sub(linked, p) for p in parts]
    return "".join(shown)


# ------------------------------------------------------------ what mkdocs calls
def on_files(files, config):  # type: ignore[no-untyped-def]  # mkdocs is not known here
    """Add the pages that are not files of `docs/`."""
    from mkdocs.structure.files import File

    made = {name: (ROOT / source).read_text(encoding="utf-8") for name, source in WHOLE.items()}
    made |= {f"reference/{name}.md": reference_page(name) for name in REFERENCE}
    made["reference/commands.md"] = commands_page()
    made["gallery.md"] = gallery_page()
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown, page, config, files):  # type: ignore[no-untyped-def]  # as above
    """Links of the repository become links of the site."""
    return with_site_links(markdown, page.file.src_uri)

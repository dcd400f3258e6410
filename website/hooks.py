"""Pages of the site besides `docs/`: start page, gallery, scripts, and links."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
WHOLE = {
    "index.md": "README.md",
    "weightsym.md": "weightsym/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
}
"""Pages that are files of the repository."""
EXAMPLES = {
    f"examples/{path.stem}.md": f"examples/{path.name}" for path in (ROOT / "examples").glob("*.py")
}
"""Pages that show a script."""
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")


def gallery_page() -> str:
    """Return a page of every picture, with its caption and the page that explains it."""
    made = yaml.safe_load((ROOT / "website/pictures.yaml").read_text(encoding="utf-8"))
    parts = ["# Gallery\n\nEvery picture, the page that says what it shows, and what makes it.\n"]
    for page in sorted((ROOT / "docs").glob("**/*.md")):
        name, text = page.relative_to(ROOT / "docs").as_posix(), page.read_text(encoding="utf-8")
        pictures = re.findall(r"!\[([^\]]*)\]\((\S+\.png)\)", text)
        if pictures:
            title = text.partition("\n")[0].lstrip("# ")
            parts.append(f"## {title}\n\nFrom [{name}]({name}).\n")
        for caption, picture in pictures:
            place = os.path.normpath(Path(name).parent / picture)
            parts.append(f"![{caption}]({place})\n\n{caption}\n")
            if place in made:
                parts.append(f"```console\n{made[place]['command'].strip()}\n```\n")
    return "\n".join(parts)


def example_page(source: str) -> str:
    """Return a page of a script, below its docstring.

    Args:
        source: the file, from the root of the repository.

    >>> print(example_page("examples/plain_loop.py")[:44])
    # plain_loop.py
    <BLANKLINE>
    A method without Lightning:
    """
    text = (ROOT / source).read_text(encoding="utf-8")
    tree = ast.parse(text)
    said = ast.get_docstring(tree)
    assert said is not None, f"{source} says nothing about itself"
    code = "\n".join(text.splitlines()[tree.body[0].end_lineno :]).strip()
    return f"# {Path(source).name}\n\n{said}\n\n```python\n{code}\n```\n"


def site_link(target: str, page: str) -> str:
    """Return the target of a link on the site.

    Files of the repository that are no pages are named by their path, without a link.

    >>> site_link("docs/demo.md", "index.md"), site_link("../README.md#start", "limits.md")
    ('demo.md', 'index.md#start')
    >>> site_link("../docs/p1.md", "weightsym.md"), site_link("weightsym/README.md", "index.md")
    ('p1.md', 'weightsym.md')
    >>> site_link("../examples/plain_loop.py", "limits.md"), site_link("../LICENSE", "limits.md")
    ('examples/plain_loop.md', '')
    """
    if "://" in target or target.startswith("#"):
        return target
    path, _, anchor = target.partition("#")
    of_repository = page in WHOLE
    place = Path(WHOLE.get(page, f"docs/{page}")).parent / path
    parts: list[str] = []
    for part in place.parts:
        parts = parts[:-1] if part == ".." else [*parts, part]
    whole = {source: name for name, source in {**WHOLE, **EXAMPLES}.items()}
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
    """Return a page whose links lead to pages of the site.

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


# ------------------------------------------------------------ notebooks
def _tutorials():  # type: ignore[no-untyped-def]  # a script and no module of a package
    spec = importlib.util.spec_from_file_location("build", ROOT / "examples/tutorials/build.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules["build"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def notebooks(repository: str | None) -> dict[str, str]:
    """Return the tutorials as notebooks, which install the release once it is public.

    Args:
        repository: its address, if it has one.
    """
    build = _tutorials()
    install = "%pip install --quiet 'lightning_bnn[all]'" if repository else ""
    return {f"tutorials/{n}.ipynb": build.notebook(n, install) for n in build.names()}


def notebook_links(page: str, repository: str | None) -> str:
    r"""Return the links above a tutorial: its notebook, and a badge that opens it in Colab.

    >>> notebook_links("tutorials/01_callbacks.md", None)
    '[Notebook](01_callbacks.ipynb)\n\n'
    >>> found = notebook_links("tutorials/x.md", "https://github.com/me/it/")
    >>> "github/me/it/blob/gh-pages/latest/tutorials/x.ipynb" in found
    True
    """
    if not page.startswith("tutorials/"):
        return ""
    name, badge = Path(page).with_suffix(".ipynb"), ""
    if repository:
        colab, owner = "https://colab.research.google.com", repository.rstrip("/").split("/")[-2:]
        target = f"{colab}/github/{'/'.join(owner)}/blob/gh-pages/latest/{name}"
        badge = f" [![Open in Colab]({colab}/assets/colab-badge.svg)]({target})"
    return f"[Notebook]({name.name}){badge}\n\n"


# ------------------------------------------------------------ what mkdocs calls
def on_files(files, config):  # type: ignore[no-untyped-def]  # mkdocs is not known here
    """Add the pages that are not files of `docs/`."""
    from mkdocs.structure.files import File

    made = {name: (ROOT / source).read_text(encoding="utf-8") for name, source in WHOLE.items()}
    made |= {name: example_page(source) for name, source in EXAMPLES.items()}
    made["gallery.md"] = gallery_page()
    made |= notebooks(config.repo_url)
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown, page, config, files):  # type: ignore[no-untyped-def]  # as above
    """Links of the repository become links of the site; tutorials get their notebooks."""
    name = page.file.src_uri
    return notebook_links(name, config.repo_url) + with_site_links(markdown, name)

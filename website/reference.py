"""The reference, made when the site is built: every public name once, and every command."""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightsym import Script

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
    "hub": "The Hub of Hugging Face",
    "files": "Weights in files",
    "datamodules": "Data",
    "models": "The papers' networks",
    "references": "Sampled posteriors",
    "evaluation": "Evaluation of predictions",
    "plots": "Figures",
    "sklearn": "Estimators for scikit-learn",
    "testing": "A pretended device",
}
"""Public modules, and the titles of their pages."""
CORE = {
    "symmetry": "weightsym",
    "params": "weightsym.params",
    "files": "weightsym.files",
}
"""Pages about modules that are not below `lightning_bnn`."""
GROUPS = {
    "Find": (
        "discovery.discover",
        "discovery.verify",
        "groups.sym",
        "groups.pl",
        "networks",
        "forms.f",
    ),
    "Remove": ("forms.canonical", "forms.sorting", "discovery.folding", "forms.balanced_form"),
    "Match": ("matching.match", "matching.a", "matching.learned", "matching.matrices"),
    "Measure": ("forms", "matching"),
    "Apply": ("",),
}
"""How the symmetries are grouped: by the files that define them, in this order."""
EXAMPLES = {
    "fit": """lightning-bnn presets digits_mfvi > mfvi.yaml
lightning-bnn fit -c mfvi.yaml --trainer.max_epochs 3 --trainer.callbacks+ MassGap
lightning-bnn fit -c mfvi.yaml --model.init_args.members 5 --data.init_args.batch_size 64""",
    "validate": "lightning-bnn validate -c mfvi.yaml",
    "test": "lightning-bnn test -c mfvi.yaml",
    "predict": "lightning-bnn predict -c mfvi.yaml",
}
"""How to call the commands that are not one function with its arguments."""
LIKE_FIT = "validate", "test", "predict"
"""Commands that take the options of `fit`."""


def module_of(page: str) -> str:
    """Return the module that a page describes.

    >>> module_of("symmetry"), module_of("callbacks")
    ('weightsym', 'lightning_bnn.callbacks')
    """
    return CORE.get(page, f"lightning_bnn.{page}")


def page_of(module: str) -> str:
    """Return the page that describes the definitions of a file.

    >>> page_of("weightsym.matching.align"), page_of("weightsym.networks.dicts")
    ('symmetry', 'params')
    """
    package, _, rest = module.partition(".")
    page = rest.partition(".")[0]
    if package != "weightsym" or page in CORE:
        return page
    if rest.startswith("networks"):
        return "files" if rest.startswith("networks.files") else "params"
    return "symmetry"


# ------------------------------------------------------------ source files
def source(module: str) -> Path | None:
    """Return the file of a module of the package, or None for another dotted path.

    >>> source("lightning_bnn.models").name, source("lightning_bnn.models.mlp")
    ('models.py', None)
    """
    root = ROOT / "weightsym" if module.startswith("weightsym") else ROOT
    place = root.joinpath(*module.split("."))
    files = place / "__init__.py", place.with_suffix(".py")
    return next((file for file in files if file.is_file()), None)


def public_names(page: str) -> list[str]:
    """Return the names that the module of a page exports, read without importing it."""
    return sorted(_exports(module_of(page)), key=str.lower)


def imports(module: str, name: str) -> list[str]:
    """Return the modules from which a name is imported, ending with its definition.

    >>> imports("weightsym", "align")[-1]
    'weightsym.matching.align'
    >>> imports("lightning_bnn.callbacks", "MassGap")[-1]
    'lightning_bnn.callbacks.mass_gap'
    """
    for node in _imports(module):
        if name in _imported(node):
            return [module, *imports(node.module or "", name)]
    return [module]


def _exports(module: str) -> list[str]:
    """The names in ``__all__`` of a module, or else all that it imports."""
    for node in _body(module):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return list(ast.literal_eval(node.value))
    return [name for node in _imports(module) for name in _imported(node)]


def _imports(module: str) -> list[ast.ImportFrom]:
    nodes = [node for node in _body(module) if isinstance(node, ast.ImportFrom)]
    ours = [
        node for node in nodes if (node.module or "").startswith(("lightning_bnn.", "weightsym."))
    ]
    return [node for node in ours if node.module != "weightsym._lazy"]


def _imported(node: ast.ImportFrom) -> list[str]:
    names = [alias.name for alias in node.names]
    return _exports(node.module or "") if names == ["*"] else names


@functools.cache
def _body(module: str) -> list[ast.stmt]:
    file = source(module)
    assert file is not None, f"there is no module {module}"
    top = ast.parse(file.read_text(encoding="utf-8")).body
    public = next((node for node in top if isinstance(node, ast.If)), None)  # see `lazy_package`
    return [*(public.body if public else []), *(n for n in top if not isinstance(n, ast.If))]


# ------------------------------------------------------------ pages
def reference_page(page: str) -> str:
    """Return the page of a module: every public name with its signature and docstring."""
    names = "\n\n".join(entry(page, name) for name in public_names(page))
    head = f"# {REFERENCE[page]}\n\n`from {module_of(page)} import ...`"
    return f"{head}\n\n{contents(page)}\n\n{names}\n"


def contents(page: str) -> str:
    """Return a line for every name of a module, with symmetries in groups."""
    files = GROUPS if page == "symmetry" else {"Name": ("",)}
    groups: dict[str, list[str]] = {title: [] for title in files}
    for name in public_names(page):
        file = imports(module_of(page), name)[-1]
        title = next(t for t in files if file.partition(".")[2].startswith(files[t]))
        row = f"| [`{name}`](#{module_of(page)}.{name}) | {summary(file, name)} |"
        groups[title].append(row)
    return "\n\n".join("\n".join([f"| {t} | |", "|---|---|", *rows]) for t, rows in groups.items())


def summary(module: str, name: str) -> str:
    """Return the first line of a name's docstring.

    >>> summary("weightsym.matching.align", "align")
    'Bring all networks of a stack into one frame.'
    """
    if method := made_of(module, name):
        return summary(imports("lightning_bnn.methods", method)[-1], method)
    file = source(f"{module}.{name}") or source(module)  # a name may be a module itself
    assert file is not None
    tree = ast.parse(file.read_text(encoding="utf-8"))
    defined = (node for node in tree.body if getattr(node, "name", "") == name)
    kinds = ast.FunctionDef, ast.ClassDef
    node = next((node for node in defined if isinstance(node, kinds)), None)
    found = ast.get_docstring(node) if node else ""
    line = (found or "").partition("\n")[0].replace("|", r"\|").replace("``", "`")
    return re.sub(":math:(?=`)", "", line)  # a formula as code


def made_of(module: str, name: str) -> str | None:
    """Return the method of a LightningModule made by `lightning_class`.

    >>> made_of("lightning_bnn.modules.by_method", "SGHMC")
    'SGMCMC'
    """
    file = source(module)
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if file else ():
        match node:
            case ast.Assign([ast.Name(target)], ast.Call(ast.Name("_made"), [method])):
                if target == name:
                    return ast.unparse(method).removeprefix("methods.")
    return None


def entry(page: str, name: str) -> str:
    """What stands for one name.

    Where a file has the name of what is imported from it, the path that users know leads to the
    file, and only the path through the file to what it defines. What is defined in a module with a
    page of its own is described there.

    Args:
        page: of the reference.
        name: one of the public names of its module.
    """
    path = f"{module_of(page)}.{name}"
    through = imports(module_of(page), name)
    heading = f"## `{name}` {{ #{path} .doc .doc-heading }}"
    if method := made_of(through[-1], name):
        of = f"[`{method}`](methods.md#lightning_bnn.methods.{method})"
        return f"{heading}\n\nThe LightningModule of {of}, with its arguments and `Bayesian`'s."
    home = page_of(through[-1])
    if home != page and home in REFERENCE and name in public_names(home):
        return f"{heading}\n\nSee [{REFERENCE[home]}]({home}.md#{module_of(home)}.{name})."
    if all(source(f"{place}.{name}") is None for place in through):
        return f"::: {path}"
    return f'<a id="{path}"></a>\n\n::: {through[-1]}.{name}'


def entries(page: str) -> list[str]:
    """The objects that a page describes, as it names them.

    >>> entries(reference_page("files"))[0]
    'weightsym.files.fit'
    """
    return re.findall(r"^::: (\S+)$", page, re.MULTILINE)


def commands(script: Script) -> dict[str, str]:
    """Return the functions behind the commands of a console script, except LightningCLI's."""
    return {n: f"{script.module_of(n)}.{n}" for n in script.commands if n not in EXAMPLES}


def commands_page() -> str:
    """Return every command with its arguments or its help."""
    from lightning_bnn.cli import Commands

    others = "\n\n".join(f"## {name}\n\n{_command(name)}" for name in EXAMPLES)
    shared = "weightsym.commands.architecture.Architecture"
    return _page_of("Commands", Commands(), others, shared)


def research_page() -> str:
    """Return every command of a clone, with its arguments."""
    from bnn_research.cli import Studies

    about = "These commands are in a clone of the repository only, where `make test` installs them."
    return _page_of("Commands of a clone", Studies(), about)


def _page_of(title: str, script: Script, text: str, *more: str) -> str:
    how = f"`{script.program} COMMAND --help` shows the same, and which arguments are options."
    functions = "\n\n".join(f"::: {path}" for path in [*commands(script).values(), *more])
    return f"# {title}\n\n{how}\n\n{text}\n\n{functions}\n"


def _command(name: str) -> str:
    """Return the description of a command, with its usage and help."""
    from lightning_bnn.cli import EVERY

    does = f"{EVERY[name][0].upper()}{EVERY[name][1:]}."
    example = f"```console\n{EXAMPLES[name]}\n```"
    if name in LIKE_FIT:
        return f"{does} It takes the options of [fit](#fit).\n\n{example}"
    return f"{does}\n\n{example}\n\n```text\n{help_of(name)}\n```"


def help_of(name: str) -> str:
    """Return the help of a command."""
    from lightning_bnn.cli import main

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([name, "--help"])
    return printed.getvalue().strip()


def faults(html: str) -> list[str]:
    """Return faults of a page of the reference.

    >>> faults('<div class="doc doc-object doc-class"><h2 id="a.B"><h2 id="a.C">')
    []
    """
    signs = {
        "doc-object doc-module": "a file of the package",
        r"doc-class-bases(?:(?!</p>).)*>_[A-Z]": "a private class",
        r":math:|\.\. math::": "a formula that is not set",
    }
    found = [fault for sign, fault in signs.items() if re.search(sign, html, re.DOTALL)]
    names = [path.rpartition(".")[2] for path in re.findall(r'<h2 id="([\w.]+)"', html)]
    return found + sorted({f"{name} twice" for name in names if names.count(name) > 1})


# ------------------------------------------------------------ what mkdocs calls
def on_files(files, config):  # type: ignore[no-untyped-def]  # mkdocs is not known here
    """Add the pages of the reference."""
    from mkdocs.structure.files import File

    made = {f"reference/{name}.md": reference_page(name) for name in REFERENCE}
    made["reference/commands.md"] = commands_page()
    made["reference/research.md"] = research_page()
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_content(html, page, config, files):  # type: ignore[no-untyped-def]  # as above
    """Refuse a page with faults."""
    from mkdocs.exceptions import PluginError

    if page.file.src_uri.startswith("reference/") and (found := faults(html)):
        raise PluginError(f"{page.file.src_uri} shows {', '.join(found)}.")
    return html

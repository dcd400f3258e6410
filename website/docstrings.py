"""Docstrings as the site shows them: formulas are set, references are lines."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import griffe
from latex2mathml.converter import convert

_WORDS = re.compile(r"\\(?:text|mathrm|operatorname)\s*\{[^}]*\}|\\[a-zA-Z]+|[a-zA-Z]{3,}")
_MATHML = "{http://www.w3.org/1998/Math/MathML}"


class Formulas(griffe.Extension):
    """Turns the few directives of reStructuredText that docstrings have into Markdown."""

    def on_instance(self, *, obj, **_):  # type: ignore[no-untyped-def]  # as griffe calls it
        """Rewrite the docstring of one function, class or module."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


class PublicBases(griffe.Extension):
    """Shows what a class has of its private bases as its own, and not those bases."""

    def on_package(self, *, pkg, **_):  # type: ignore[no-untyped-def]  # as griffe calls it
        """Rewrite the classes of a package whose files have all been read."""
        _without_private_bases(pkg)


def as_markdown(text: str) -> str:
    r"""Convert a docstring without directives to Markdown.

    >>> as_markdown("Mean, :math:`x`.\n\nEnd, see ``a``.")[:50]
    'Mean, <math xmlns="http://www.w3.org/1998/Math/Mat'
    >>> as_markdown("Sum.\n\n>>> 1 + 1\n2")
    'Sum.\n\n```pycon\n>>> 1 + 1\n2\n```'
    >>> as_markdown("References:\n    | Title\n    | Place")
    'References:\n    Title  \n    Place  '
    """
    text = re.sub(r":math:`([^`]*)`", lambda m: as_mathml(m[1], "inline"), text)
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    block = re.compile(r"^\.\. math:: *(.*(?:\n(?!\n).+)*)", re.MULTILINE)
    text = block.sub(lambda m: f'<div class="formula">{as_mathml(m[1], "block")}</div>', text)
    text = re.sub(r"^>>> .*(?:\n(?!\n).+)*", r"```pycon\n\g<0>\n```", text, flags=re.MULTILINE)
    return re.sub(r"^( *)\| (.*)$", r"\1\2  ", text, flags=re.MULTILINE)


def as_mathml(latex: str, display: str) -> str:
    r"""Convert a formula to MathML, which browsers set without scripts or fonts.

    Words of three letters are names, not products; names of functions stand off what follows.

    Args:
        latex: the formula.
        display: ``"inline"`` or ``"block"``.

    >>> print(as_mathml(r"\log p", "inline").partition(">")[2])
    <mrow><mi>log</mi><mspace width="0.17em" /><mi>p</mi></mrow></math>
    >>> "softmax" in as_mathml("softmax(z)", "inline")
    True
    >>> as_mathml(r"\nonsense x", "inline")
    Traceback (most recent call last):
    ...
    ValueError: the formula \nonsense x has a command that is not known: \nonsense
    """
    latex = re.sub(r"\\arg\b", r"\\operatorname{arg}", latex)
    latex = re.sub(r"\\mathrm(?=\{[^}]{2,}\})", r"\\operatorname", latex)
    named = _WORDS.sub(lambda m: m[0] if m[0][0] == "\\" else rf"\operatorname{{{m[0]}}}", latex)
    tree = ElementTree.fromstring(convert(" ".join(named.split()), display=display))
    for node in tree.iter():
        _mend(node, display)
        if "\\" in (node.text or ""):
            raise ValueError(f"the formula {latex} has a command that is not known: {node.text}")
    for row in [*tree.iter(f"{_MATHML}mrow"), *tree.iter(f"{_MATHML}mstyle")]:
        _set_apart(row)
    ElementTree.register_namespace("", _MATHML[1:-1])
    return ElementTree.tostring(tree, encoding="us-ascii").decode()


def _mend(node: ElementTree.Element, display: str) -> None:
    """Correct what the conversion does not do as TeX does."""
    text = node.text = (node.text or "").replace("\\_", "_")
    if text == "\u2016":
        node.attrib.setdefault("stretchy", "false")
    elif node.tag == f"{_MATHML}mo" and text.isalpha() and len(text) > 1:
        node.tag = f"{_MATHML}mi"  # operators have wide margins
    elif display == "block" and node.tag == f"{_MATHML}msub" and node[0].text in ("min", "max"):
        node.tag = f"{_MATHML}munder"


def _set_apart(row: ElementTree.Element) -> None:
    """Spaces as TeX has them: around names of functions, none around bars, slashes and signs."""
    children = [*row]
    for before, after in zip([None, *children], children, strict=False):
        if after.text in ("|", "/"):
            after.attrib.update(lspace="0", rspace="0")
        elif after.text == "~":
            after.text = "\u223c"  # a relation, not a character of the keyboard
        elif after.text == "\u2212" and before is not None and _opens(before):
            after.set("form", "prefix")
        elif before is not None and not _apart(before, after) and _is_name(before, after):
            row.insert([*row].index(after), ElementTree.Element(f"{_MATHML}mspace", width="0.17em"))


def _opens(node: ElementTree.Element) -> bool:
    """Check whether a following minus is a sign."""
    return node.tag == f"{_MATHML}mo" and node.text not in (")", "]", "}", "|", "\u2016", "!")


def _apart(*nodes: ElementTree.Element) -> bool:
    """Check whether one of them has a margin."""
    return any(node.tag in (f"{_MATHML}mo", f"{_MATHML}mspace") for node in nodes)


def _is_name(*nodes: ElementTree.Element) -> bool:
    """Check whether one of them is the name of a function, possibly with an index."""
    scripts = [f"{_MATHML}{kind}" for kind in ("msub", "msup", "munder")]
    bases = [node[0] if node.tag in scripts else node for node in nodes]
    return any(base.tag == f"{_MATHML}mi" and len(base.text or "") > 1 for base in bases)


def _without_private_bases(module: griffe.Object) -> None:
    """The classes of a module and of those below it take over what their private bases have."""
    for member in [*module.members.values()]:
        if member.is_alias:
            continue
        if member.is_class:
            _take_over(member)
        if member.is_module:
            _without_private_bases(member)


def _take_over(cls: griffe.Class) -> None:
    """Replace private bases by theirs, and their public members by members of the class."""
    for base in [*cls.resolved_bases]:
        if not base.name.startswith("_") or base.is_alias or not base.is_class:
            continue
        _take_over(base)
        kept = [b for b in cls.bases if str(b).rpartition(".")[2].partition("[")[0] != base.name]
        cls.bases = [*kept, *(b for b in base.bases if str(b) not in map(str, kept))]
        for name, member in base.members.items():
            public = name == "__init__" or not name.startswith("_")
            if public and name not in cls.members:
                cls.set_member(name, griffe.Alias(name, member, parent=cls))

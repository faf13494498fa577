"""Builds the embedded data set: instructions and Python functions found on this machine.

Decides which functions of the standard library and of installed packages become rows, how a docstring becomes an
instruction, and which modules are held out. Knows nothing of models, tokenizers or of where the result is stored.

The source files are read with `ast`; no package is imported and no code of a package is run. The same files give the
same rows in the same order on every machine: order and split come from SHA-256 hashes, never from a random state.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

STANDARD_LIBRARY = "python"
"""Name under which the running interpreter's standard library is asked for."""

DEFAULT_SOURCES = (STANDARD_LIBRARY, "networkx", "sympy", "mpmath", "numpy", "pandas", "jinja2", "packaging", "fsspec",
                   "huggingface_hub", "datasets", "tqdm")  # fmt: skip
"""Packages that an installation of the tutorial has anyway; one that is missing is skipped."""

SKIPPED_FOLDERS = frozenset({"tests", "test", "testing", "site-packages", "idlelib", "lib2to3", "turtledemo", "_vendor",
                             "benchmarks", "conftest.py"})  # fmt: skip

HELD_OUT_PER_CENT = 10
CODE_CHARACTERS = (60, 900)
SUMMARY_CHARACTERS = (24, 240)
MIN_BODY_LINES = 1
MAX_PARAMETERS = 6

# Decorators that register or wrap a function without changing what its body means; the decorator itself is left out
# of the row. A function with any other decorator is skipped: without it the code would say something else.
HARMLESS_DECORATORS = frozenset({"_dispatchable", "not_implemented_for", "public", "set_module", "cacheit", "cache",
                                 "lru_cache", "array_function_dispatch", "defun", "validate_hf_hub_args"})  # fmt: skip

# First words of a docstring that say what a function does. A docstring that begins otherwise gives no row.
_VERB_LIST = """
    accept add append apply approximate assert assign attach break build calculate call change check choose clean
    clear close collect combine compare compile compute concatenate construct convert copy count create decode
    decompose decrease define delete derive describe detect determine differentiate divide download draw drop emit
    encode ensure enumerate escape estimate evaluate execute expand export extend extract factor fetch fill filter
    find fix flatten format generate get give group guess handle hash import increase infer insert inspect install
    integrate invert iterate join list load locate look make map match measure merge modify move multiply normalize
    open pack pad parse partition perform pick plot pop prepare print process produce prompt push put quote raise read
    rebuild recover reduce register remove rename render replace report represent reset resolve retrieve return
    reverse rewrite run sample save scale scan search select send separate serialize set shift show simplify solve
    sort split start stop store strip substitute subtract sum swap test transform translate traverse truncate try
    turn unpack unquote update validate verify wait walk wrap write yield
"""
VERBS = frozenset(_VERB_LIST.split())

REST_ROLE = re.compile(r":[a-z:+-]+:`~?([^`<>]+?)(?:\s*<[^`]*>)?`")
SENTENCE_END = re.compile(r"(?<!e\.g)(?<!i\.e)(?<!\betc)(?<!\bcf)\.(?=\s|$)")


@dataclass(frozen=True)
class Row:
    """One instruction and the function that answers it.

    Attributes:
        instruction: What to write, in words, with the function's signature.
        output: Source of the function without its docstring and decorators.
        module: Dotted name of the module it was found in; the split goes by it.
    """

    instruction: str
    output: str
    module: str


def build_rows(sources: Iterable[str] = DEFAULT_SOURCES, max_rows: int = 4000) -> tuple[list[Row], list[Row]]:
    """Returns the (training, held-out) rows of `sources`.

    A function that occurs more than once, under whatever name or formatting, gives one row, so that nothing held out is
    also trained on. No module gives rows to both parts.

    Args:
        sources: Names of packages, or `STANDARD_LIBRARY`.
        max_rows: Most rows to keep, both parts together.

    Raises:
        ValueError: No source is installed, so that there is not one row.
    """
    names = tuple(sources)
    found: dict[str, Row] = {}
    for name in names:
        for module, text in read_modules(name):
            for row, body_key in rows_of_module(module, text):
                found.setdefault(body_key, row)
    if not found:
        raise ValueError(f"no documented function found in any of {', '.join(names) or 'no sources at all'}")
    in_order = sorted(found.values(), key=lambda row: (stable_hash(row.module + row.output), row.module))[:max_rows]
    train = [row for row in in_order if not is_held_out(row.module)]
    held_out = [row for row in in_order if is_held_out(row.module)]
    return train, held_out


def is_held_out(module: str) -> bool:
    """Tells whether the rows of `module` are kept for evaluation: fixed for ever by the module's name."""
    return int(stable_hash(module)[:8], 16) % 100 < HELD_OUT_PER_CENT


def read_modules(source: str) -> Iterator[tuple[str, str]]:
    """Yields (dotted name, text) of every module of an installed source; nothing where it is not installed."""
    if source == STANDARD_LIBRARY:
        root, prefix = Path(sysconfig.get_paths()["stdlib"]), ""
    else:
        spec = importlib.util.find_spec(source)
        if spec is None or spec.origin is None:
            return
        root, prefix = Path(spec.origin).parent, source + "."
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if SKIPPED_FOLDERS.intersection(parts) or not all(part.isidentifier() for part in parts):
            continue
        try:
            yield prefix + ".".join(parts), path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # an old file in another encoding


def rows_of_module(module: str, text: str) -> Iterator[tuple[Row, str]]:
    """Yields (row, key of the function's body) for each suitable top-level function of a module.

    The key is equal for two functions that compute the same in the same words, whatever their comments and layout.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old string escapes in other people's files
            tree = ast.parse(text)
    except SyntaxError:
        return
    lines = text.splitlines()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and _is_suitable(node):
            summary = summarise(ast.get_docstring(node) or "")
            code = _source_without_docstring(node, lines)
            if summary is None or code is None:
                continue
            row = Row(instruct(_signature(node), summary, chooser=module + node.name), code, module)
            yield row, stable_hash("".join(ast.dump(statement) for statement in node.body[1:]))


def summarise(docstring: str) -> str | None:
    """Returns the first sentence of a docstring as plain text beginning with a verb's base form, or None.

    >>> summarise("Returns the :func:`area` of a ``Square`` in metres.  Slow.")
    'return the `area` of a `Square` in metres'
    """
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    paragraph = REST_ROLE.sub(r"`\1`", paragraph).replace("``", "`")
    sentence = SENTENCE_END.split(paragraph)[0].strip().rstrip(":")
    first, _, rest = sentence.partition(" ")
    verb = _base_form(first.lower())
    if verb is None or not rest or not SUMMARY_CHARACTERS[0] <= len(sentence) <= SUMMARY_CHARACTERS[1]:
        return None
    if not sentence.isascii() or any(mark in sentence for mark in ("|", "::", "{{", ">>>", "\\", "http", "$", "_`")):
        return None
    if re.search(r"\b(self|deprecated|see also|TODO|XXX)\b", sentence, re.IGNORECASE) or sentence.count("`") % 2:
        return None
    return f"{verb} {rest}"


def instruct(signature: str, summary: str, chooser: str) -> str:
    """Returns an instruction in one of a few forms, chosen by the hash of `chooser`.

    Args:
        signature: For example `area(width, height)`.
        summary: What the function does, beginning with a verb in its base form.
        chooser: Any text that belongs to the row.
    """
    verb, _, rest = summary.partition(" ")
    forms = [
        f"Write a Python function `{signature}` to {summary}.",
        f"Implement `{signature}` in Python. It should {summary}.",
    ]
    if " and " not in rest:  # a second verb would have to change its form too
        forms.append(f"Write a Python function `{signature}` that {_third_person(verb)} {rest}.")
    return forms[int(stable_hash(chooser)[:8], 16) % len(forms)]


def _is_suitable(node: ast.FunctionDef) -> bool:
    decorators = (d.func if isinstance(d, ast.Call) else d for d in node.decorator_list)
    names = (d.attr if isinstance(d, ast.Attribute) else getattr(d, "id", "") for d in decorators)
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return (
        not node.name.startswith("_")
        and not node.name.startswith("test")
        and ast.get_docstring(node) is not None
        and all(name in HARMLESS_DECORATORS for name in names)
        and len(arguments) <= MAX_PARAMETERS
        and not any(argument.arg in ("self", "cls") for argument in arguments)
    )


def _signature(node: ast.FunctionDef) -> str:
    """Returns `name(arguments)` with defaults and without annotations."""
    arguments = ast.parse(f"def f({ast.unparse(node.args)}): pass").body[0].args  # type: ignore[attr-defined]
    for inner in ast.walk(arguments):
        if isinstance(inner, ast.arg):
            inner.annotation = None
    return f"{node.name}({ast.unparse(arguments)})"


def _source_without_docstring(node: ast.FunctionDef, lines: list[str]) -> str | None:
    """Returns the function's own lines less the docstring, or None where that is no sensible answer."""
    docstring = node.body[0]
    if len(node.body) < 2 or docstring.end_lineno is None or node.end_lineno is None:
        return None
    before = lines[node.lineno - 1 : docstring.lineno - 1]
    after = lines[docstring.end_lineno : node.end_lineno]
    while after and not after[0].strip():
        after = after[1:]
    code = "\n".join(line.rstrip() for line in [*before, *after]).expandtabs(4)
    if not CODE_CHARACTERS[0] <= len(code) <= CODE_CHARACTERS[1] or not code.isascii():
        return None
    if len(after) < MIN_BODY_LINES or "NotImplementedError" in code or "deprecat" in code.lower():
        return None
    try:
        ast.parse(code)  # a docstring that shares its line with other code leaves none
    except SyntaxError:
        return None
    return code


def _base_form(word: str) -> str | None:
    """Returns the verb whose base form or third person `word` is, or None."""
    endings = {"": "", "ies": "y", "es": "", "s": ""}
    candidates = (word.removesuffix(end) + put for end, put in endings.items() if word.endswith(end))
    return next((verb for verb in candidates if verb in VERBS), None)


def _third_person(verb: str) -> str:
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ies"
    return verb + ("es" if verb.endswith(("s", "sh", "ch", "x", "z")) else "s")


def stable_hash(text: str) -> str:
    """Returns a hash that is the same on every machine and in every run."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()

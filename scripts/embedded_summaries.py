"""Builds the embedded summaries: articles with their highlights, out of long docstrings found on this machine.

Decides which docstrings become rows: the prose that follows the first line is the article, the first line its
highlights. Knows nothing of models, tokenizers or of where the result is stored. How files are read, and which modules
are held out, is decided by `embedded_data`.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from embedded_data import DEFAULT_SOURCES, REST_ROLE, is_held_out, read_modules, stable_hash

SOURCES = (*DEFAULT_SOURCES, "matplotlib")
ARTICLE_CHARACTERS = (240, 2000)
HIGHLIGHTS_CHARACTERS = (24, 160)
MIN_SENTENCES = 2

# A paragraph that begins like this is a heading, a list, code or a table of parameters; what follows it is no prose.
NO_PROSE = re.compile(r">>>|\.\.|[-*+=~:@|]|\d+[.)]|[A-Z][\w ]*:$|[A-Z][\w ]* -{3,}|\w+ ?(\([^)]*\))?:( |$)|\w+ : ")
MARKS = ("|", "::", ">>>", "{{", "\\", "http", "$", "_`", "___", "```", "==", "    ")


@dataclass(frozen=True)
class Summary:
    """One article and its highlights, with the columns of cnn_dailymail.

    Attributes:
        article: Two sentences or more.
        highlights: What they are about, in one sentence.
        id: Hash of the article.
        module: Dotted name of the module it was found in; the split goes by it.
    """

    article: str
    highlights: str
    id: str
    module: str


def build_summaries(sources: Iterable[str] = SOURCES, max_rows: int = 4000) -> tuple[list[Summary], list[Summary]]:
    """Returns the (training, held-out) rows of `sources`; none of the one is also in the other.

    Args:
        sources: Names of packages, or `embedded_data.STANDARD_LIBRARY`.
        max_rows: Most rows to keep, both parts together.

    Raises:
        ValueError: No docstring is long enough.
    """
    names = tuple(sources)
    found: dict[str, Summary] = {}
    highlights = set()
    for name in names:
        for module, text in read_modules(name):
            for row in summaries_of_module(module, text):
                if row.highlights not in highlights:
                    found.setdefault(row.id, row)
                    highlights.add(row.highlights)
    if not found:
        raise ValueError(f"no long docstring found in any of {', '.join(names) or 'no sources at all'}")
    in_order = [found[key] for key in sorted(found)][:max_rows]
    train = [row for row in in_order if not is_held_out(row.module)]
    held_out = [row for row in in_order if is_held_out(row.module)]
    return train, held_out


def summaries_of_module(module: str, text: str) -> Iterator[Summary]:
    """Yields a row for each suitable docstring of a module, its classes and its functions."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old string escapes in other people's files
            tree = ast.parse(text)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            article, highlights = split_docstring(ast.get_docstring(node) or "")
            if article and highlights:
                yield Summary(article, highlights, stable_hash(article)[:40], module)


def split_docstring(docstring: str) -> tuple[str, str]:
    """Returns (article, highlights) of a docstring, both empty where it is no such text.

    >>> split_docstring("Opens the file.\\n\\n>>> open_it()")
    ('', '')
    """
    first, *others = (" ".join(part.split()) for part in docstring.strip().split("\n\n"))
    prose = []
    for paragraph in others:
        if NO_PROSE.match(paragraph) or any(mark in paragraph for mark in MARKS):
            break
        prose.append(paragraph)
    article, highlights = _plain(" ".join(prose)), _plain(first)
    if (
        not ARTICLE_CHARACTERS[0] <= len(article) <= ARTICLE_CHARACTERS[1]
        or not HIGHLIGHTS_CHARACTERS[0] <= len(highlights) <= HIGHLIGHTS_CHARACTERS[1]
        or any(mark in highlights for mark in MARKS)
        or not highlights.endswith(".")
        or not article.endswith((".", "!", "?"))
        or len(re.findall(r"[.!?](?= |$)", article)) < MIN_SENTENCES
        or not (article + highlights).isascii()
        or "copyright" in article.lower()
    ):
        return "", ""
    return article, highlights


def _plain(text: str) -> str:
    """Returns text without the marks of reStructuredText."""
    return REST_ROLE.sub(r"\1", text).replace("``", "").replace("`", "").strip()

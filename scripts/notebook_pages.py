"""Writes the notebooks of tutorials/notebooks as pages of the site, with the outputs and pictures that are in them.

    python scripts/notebook_pages.py                  # docs/notebooks/*.md, *.ko.md and pictures
    python scripts/notebook_pages.py --fingerprints quick_start    # what a translation has to name

Decides how a notebook becomes Markdown and where its translated prose comes from. Runs nothing: outputs are what the
last run left in the file. The pages are written before each build of the site and are not kept in git.

[Note: translations]
`<name>.ko.md` beside a notebook has a section for each cell of prose, and for each picture's description:

    <!-- cell: title 1a2b3c4d -->

The word is the cell's id, the number a fingerprint of the English text that was translated. A missing section, one too
many, or one whose English has changed since is an error, so a page never shows a mixture or something out of date.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import re
import shutil
import sys
from pathlib import Path

import nbformat
from jinja2 import DictLoader
from nbconvert import MarkdownExporter
from nbformat import NotebookNode

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ROOT / "tutorials" / "notebooks"
PAGES = ROOT / "docs" / "notebooks"
LANGUAGES = ("ko",)

_SECTION = re.compile(r"^<!-- cell: (\S+) ([0-9a-f]{8}) -->\n", re.MULTILINE)
_LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")
_TEMPLATE = """
{%- extends 'markdown/index.md.j2' -%}
{%- block stream %}
```text
{{ output.text | strip_ansi | trim }}
```
{% endblock stream -%}
{%- block data_text scoped %}
```text
{{ output.data['text/plain'] | trim }}
```
{% endblock data_text -%}
{%- block data_png scoped %}
![{{ cell.metadata.alt }}]({{ output.metadata.filenames['image/png'] | path2url }})
{% endblock data_png -%}
"""


class PageError(Exception):
    """A notebook or its translation cannot become a page; the text says what to do."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--notebooks", type=Path, default=NOTEBOOKS, metavar="FOLDER", help="where to read")
    parser.add_argument("--pages", type=Path, default=PAGES, metavar="FOLDER", help="where to write; emptied before")
    parser.add_argument("--fingerprints", metavar="NAME", help="print the heads of a notebook's translation, and stop")
    arguments = parser.parse_args()
    if arguments.fingerprints:
        notebook = read(arguments.notebooks / f"{arguments.fingerprints}.ipynb")
        print(*(head_of(name, text) for name, text in prose_of(notebook).items()), sep="\n")
        return 0
    try:
        written = write_pages(arguments.notebooks, arguments.pages)
    except PageError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{len(written)} pages in {arguments.pages}")
    return 0


def write_pages(notebooks: Path, pages: Path) -> list[Path]:
    """Returns the pages it wrote: each notebook in English and in every other language.

    Raises:
        PageError: A notebook has not been run, a translation is not complete, or a link leaves the site.
    """
    shutil.rmtree(pages, ignore_errors=True)
    pages.mkdir(parents=True)
    written = []
    for path in sorted(notebooks.glob("*.ipynb")):
        notebook = read(path)
        versions = {pages / f"{path.stem}.md": notebook}
        for language in LANGUAGES:
            versions[pages / f"{path.stem}.{language}.md"] = translated(notebook, path.with_suffix(f".{language}.md"))
        for page, version in versions.items():
            text, pictures = as_markdown(version, f"{path.stem}_files")
            page.write_text(with_links(text, path), encoding="utf-8")
            for name, data in pictures.items():
                (pages / name).parent.mkdir(exist_ok=True)
                (pages / name).write_bytes(data)
        written += versions
    if not written:
        raise PageError(f"there are no notebooks in {notebooks}")
    return written


def read(path: Path) -> NotebookNode:
    """Returns a notebook that has been run.

    Raises:
        PageError: It has not, or a picture has no description.
    """
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code" and cell.execution_count is None:
            raise PageError(f"{path.name}: cell {cell.id} has not been run\nTry: python scripts/execute_notebooks.py")
        if "alt" not in cell.metadata and any("image/png" in out.get("data", {}) for out in cell.get("outputs", [])):
            raise PageError(f"{path.name}: the picture of cell {cell.id} needs a description: metadata 'alt'")
    return notebook


def prose_of(notebook: NotebookNode) -> dict[str, str]:
    """Returns what has to be translated, by cell: text cells, and descriptions of pictures."""
    prose = {}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            prose[cell.id] = cell.source
        elif "alt" in cell.metadata:
            prose[cell.id] = cell.metadata.alt
    return prose


def head_of(name: str, text: str) -> str:
    """Returns the line above the translation of `text`. See [Note: translations]."""
    return f"<!-- cell: {name} {hashlib.sha256(text.encode()).hexdigest()[:8]} -->"


def translated(notebook: NotebookNode, path: Path) -> NotebookNode:
    """Returns the notebook with its prose replaced by that of a translation.

    Raises:
        PageError: The translation is missing, incomplete or out of date.
    """
    if not path.is_file():
        raise PageError(f"{path.name} is missing: every notebook needs its translation beside it")
    pieces = _SECTION.split(path.read_text(encoding="utf-8"))
    sections = {name: text.strip() for name, text in zip(pieces[1::3], pieces[3::3])}
    heads = [head_of(name, text) for name, text in prose_of(notebook).items()]
    found = [f"<!-- cell: {name} {number} -->" for name, number in zip(pieces[1::3], pieces[2::3])]
    if wrong := [f"not translated, or not since it changed: {head}" for head in heads if head not in found] + [
        f"of no cell: {head}" for head in found if head not in heads
    ]:
        raise PageError("\n".join([f"{path.name} does not belong to the notebook as it is:", *wrong]))
    if pieces[0].strip():
        raise PageError(f"{path.name}: no cell has the text before the first head: {pieces[0].strip()[:60]!r}")
    if empty := [name for name, text in sections.items() if not text]:
        raise PageError(f"{path.name}: nothing is written for {', '.join(empty)}")
    result = copy.deepcopy(notebook)
    for cell in result.cells:
        if cell.id in sections and cell.cell_type == "markdown":
            cell.source = sections[cell.id]
        elif cell.id in sections:
            cell.metadata.alt = sections[cell.id]
    return result


def as_markdown(notebook: NotebookNode, folder: str) -> tuple[str, dict[str, bytes]]:
    """Returns a notebook as Markdown, and its pictures by the names that the text gives them, all in `folder`."""
    exporter = MarkdownExporter(template_file="page.md.j2", extra_loaders=[DictLoader({"page.md.j2": _TEMPLATE})])
    text, resources = exporter.from_notebook_node(notebook, {"output_files_dir": folder, "unique_key": "output"})
    return text.strip() + "\n", resources["outputs"]


def with_links(text: str, path: Path) -> str:
    """Returns a page's text with its links to notebooks and to docs as they are on the site.

    Raises:
        PageError: A link goes to a file that is not there, or is no page.
    """

    def on_site(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ""
        if target.startswith(f"{path.stem}_files/"):
            return match[0]
        if not (path.parent / target).exists():
            raise PageError(f"{path.name} links to {target}, which does not exist")
        if target.endswith(".ipynb") and "/" not in target:
            return f"]({target[: -len('.ipynb')]}.md{anchor})"
        if target.startswith("../../docs/"):
            return f"](../{target[len('../../docs/') :]}{anchor})"
        raise PageError(f"{path.name} links to {target}, which is neither a notebook nor below docs/")

    return _LINK.sub(on_site, text)


if __name__ == "__main__":
    sys.exit(main())

"""What the tests of the site look at: pages in Markdown, pages in HTML, and what is in them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LANGUAGES = {"en": "", "ko": "ko/"}
"""Language: its folder in the site."""

WRITTEN_BY_THE_BUILD = {"reference/api.md", "reference/api.ko.md"}


def source_pages() -> dict[str, set[str]]:
    """Returns the pages of every language, each under the name of the English one, without those the build writes."""
    names = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} - WRITTEN_BY_THE_BUILD
    names = {name for name in names if not name.startswith(("theme/", "notebooks/", "shared/"))}
    korean = {name for name in names if name.endswith(".ko.md")}
    return {"en": names - korean, "ko": {name.replace(".ko.md", ".md") for name in korean}}


def nav_pages() -> list[str]:
    """Returns the pages of the navigation, in order."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    return [line.rsplit(": ", 1)[1] for line in text.splitlines() if line.endswith(".md")]


def place(page: str, language: str) -> str:
    """Returns where a page lies in the site: ``ap/how-to-use.md`` is at ``ko/ap/how-to-use/``."""
    name = page.removesuffix(".md")
    return LANGUAGES[language] + ("" if name == "index" else f"{name}/")


@dataclass
class Page:
    """A page of the built site.

    Attributes:
        language: What ``<html lang>`` says.
        ids: Everything that an address with ``#`` can point to.
        links: What ``<a>`` point to, as written.
        images: What ``<img>`` show, as written.
        text: The text of the article.
    """

    language: str = ""
    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    text: str = ""


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.page = Page()
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag == "html":
            self.page.language = values.get("lang", "")
        self._inside = self._inside or tag == "article"
        self.page.ids |= {values[name] for name in ("id", "name") if name in values and tag != "meta"}
        if tag == "a" and "href" in values:
            self.page.links.append(values["href"])
        if tag == "img":
            self.page.images.append(values.get("src", ""))

    def handle_endtag(self, tag: str) -> None:
        if tag == "article":
            self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.page.text += data


@dataclass(frozen=True)
class Site:
    """The built site, and what the build said."""

    folder: Path
    log: str

    def files(self) -> list[Path]:
        """Returns every page but the one for addresses that do not exist."""
        return sorted(path for path in self.folder.rglob("*.html") if path.name != "404.html")

    def page(self, file: Path) -> Page:
        """Returns what is in a file."""
        return _read(file)

    def target(self, file: Path, link: str) -> tuple[Path, str] | None:
        """Returns the file and the id that a link on a page leads to, or None if it leads out of the site."""
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            return None
        found = file if not parts.path else (file.parent / unquote(parts.path)).resolve()
        if parts.path and (found.is_dir() or parts.path.endswith("/")):
            found /= "index.html"
        return found, unquote(parts.fragment)


@functools.cache
def _read(file: Path) -> Page:
    reader = _Reader()
    reader.feed(file.read_text(encoding="utf-8"))
    return reader.page

"""Pages in a browser that has no network: nothing is missing, nothing is wider than the screen, search finds things."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest
from site_pages import DOCS, LANGUAGES, ROOT, nav_pages, place

pytestmark = pytest.mark.browser

SIZES = {"desktop": (1280, 900), "tablet": (768, 1024), "phone": (390, 844)}
SCREENSHOTS = os.environ.get("MOREH_AP_SCREENSHOTS")
"""A folder for pictures of every page in all sizes; without it there are none."""

SETTLED = """() => document.fonts.ready.then(() => !document.querySelector("pre.mermaid")
    && [...document.images].every(image => image.complete))"""
READY = """() => /start searching|입력하세요/.test(document.querySelector(".md-search-result__meta").textContent)"""
"""What the search says once it has read its index."""

WIDER = """() => [...document.querySelectorAll("article *")]
    .filter(one => one.getBoundingClientRect().right > innerWidth + 1 && !one.closest(".md-typeset__scrollwrap, pre"))
    .map(one => one.tagName + ": " + one.textContent.slice(0, 60)).slice(0, 3)"""
DRAWN = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"
CLIPPED = """() => [...document.querySelectorAll("article .md-typeset__scrollwrap")]
    .filter(one => one.scrollWidth > one.clientWidth + 1 && one.querySelectorAll("thead th").length <= 14)
    .map(one => one.textContent.trim().slice(0, 60))"""
"""Tables of which a part is out of sight; a matrix, which has more columns, is moved sideways."""
LONG_LINES = """() => [...document.querySelectorAll("article pre > code")]
    .filter(one => one.scrollWidth > one.clientWidth + 1).map(one => one.textContent.trim().slice(0, 60))"""
LONG_CODE = LONG_LINES.replace("article pre", "article .highlight:not(.language-text) pre")
"""On phones what is drawn with characters may be moved sideways."""

BROKEN_ROWS = """() => [...document.querySelectorAll("article .language-text pre > code")].flatMap(code => {
    const texts = document.createTreeWalker(code, NodeFilter.SHOW_TEXT), broken = [];
    const tops = new Set(), row = document.createRange();
    let line = "";
    for (let text = texts.nextNode(); text; text = texts.nextNode())
        for (let at = 0; at < text.length; at++)
            if (text.data[at] != "\\n") {
                row.setStart(text, at);
                row.setEnd(text, at + 1);
                tops.add(Math.round(row.getBoundingClientRect().top));
                line += text.data[at];
            } else {
                if (tops.size > 1 && /[\u2500-\u259f]|[-=]{8,}/.test(line)) broken.push(line);
                tops.clear();
                line = "";
            }
    return broken;
})"""
"""Rows of tables drawn with characters that go on in a second line."""

OPEN_DRAWINGS = """const attach = Element.prototype.attachShadow;
Element.prototype.attachShadow = function(how) { return attach.call(this, {...how, mode: "open"}); };"""
"""What lets a test look into a drawing."""
COLOURS_OF_ARROWS = """() => [...document.querySelectorAll("article div.mermaid")].flatMap(drawing => {
    const line = drawing.shadowRoot.querySelector(".messageLine0");
    const head = drawing.shadowRoot.querySelector("[id$='-arrowhead'] path");
    return line && head ? [[getComputedStyle(line).stroke, getComputedStyle(head).fill]] : [];
})"""
"""Of each drawing of messages: the colour of its first line, and that of the head of an arrow."""

CUT_COMMANDS = """() => [...document.querySelectorAll("article :is(.language-sh, .language-bash) pre > code")]
    .filter(one => one.scrollWidth > one.clientWidth + 1).map(one => one.textContent.trim().slice(0, 60))"""


@pytest.fixture(scope="module")
def window(chromium, address):
    """A browser window that reaches this site alone, and the list of what went wrong in it."""
    problems: list[str] = []
    context = chromium.new_context()

    def answer(route) -> None:
        if route.request.url.startswith((address, "data:", "blob:")):
            route.continue_()
        else:
            problems.append(f"asks another server: {route.request.url}")
            route.abort()

    context.route("**/*", answer)
    page = context.new_page()
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("response", lambda response: problems.append(f"{response.status} {response.url}") if not response.ok else 0)
    yield page, problems
    context.close()


@pytest.mark.rotating  # one more page each
@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", nav_pages())
def test_page_fits_the_screen_and_reports_nothing(window, site, address, name, language):
    page, problems = window
    problems.clear()
    drawings = 'class="mermaid"' in (site.folder / place(name, language) / "index.html").read_text(encoding="utf-8")
    if drawings and not (DOCS / "assets" / "vendor" / "mermaid.min.js").exists():
        pytest.skip("the library that draws diagrams is not there: apt-get install npm")
    page.set_viewport_size(dict(zip(("width", "height"), SIZES["desktop"])))
    page.goto(address + place(name, language))
    page.wait_for_function(SETTLED, timeout=20_000)
    for size, (width, height) in SIZES.items():
        page.set_viewport_size({"width": width, "height": height})
        page.evaluate(DRAWN)
        if SCREENSHOTS:
            picture = f"{place(name, language).strip('/').replace('/', '-') or 'index'}.{size}.png"
            page.screenshot(path=Path(SCREENSHOTS) / picture, full_page=True)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, page.evaluate(WIDER)
        assert page.evaluate(CLIPPED) == [], size
        assert page.evaluate("document.querySelectorAll('article .md-typeset__table > table[class]').length") == 0, size
        assert page.evaluate(LONG_LINES if size != "phone" else LONG_CODE) == [], size
        assert page.evaluate(CUT_COMMANDS) == [], size
        assert size == "phone" or page.evaluate(BROKEN_ROWS) == [], size
    assert page.evaluate("[...document.images].filter(one => !one.naturalWidth).map(one => one.src)") == []
    heights = page.evaluate("[...document.querySelectorAll('article div.mermaid')].map(one => one.offsetHeight)")
    assert bool(heights) == drawings
    assert all(height > 60 for height in heights)
    assert problems == []


@pytest.mark.parametrize("language, words, expected", [
    ("en", "micro_batches", "ap/advanced-settings/"),
    ("en", "WorkerLostError", "errors/"),
    ("ko", "가상", "ko/"),
])  # fmt: skip
def test_search_finds(window, address, language, words, expected):
    page, problems = window
    problems.clear()
    page.set_viewport_size(dict(zip(("width", "height"), SIZES["desktop"])))
    page.goto(address + place("index.md", language))
    page.click(".md-search__input")
    page.wait_for_function(READY, timeout=20_000)
    page.keyboard.type(words)
    page.keyboard.press("Shift")  # a released key makes the search look; letters of no keyboard are typed without one
    page.wait_for_selector(".md-search-result__item a", timeout=20_000)
    links = page.evaluate("[...document.querySelectorAll('.md-search-result__item a')].map(one => one.href)")
    assert any(link.startswith(address + expected) for link in links), links
    assert problems == []


def test_the_language_can_be_switched(window, address):
    page, problems = window
    problems.clear()
    page.goto(address)
    other = page.evaluate("document.querySelector('.md-select__link[hreflang=ko]').href")
    assert other == address + "ko/"
    page.goto(other)
    assert page.evaluate("document.documentElement.lang") == "ko"
    assert problems == []


def test_arrows_of_drawings_have_the_colour_of_their_lines(chromium, address):
    """In dark mode too, where the library's own colour is hardly seen."""
    if not (DOCS / "assets" / "vendor" / "mermaid.min.js").exists():
        pytest.skip("the library that draws diagrams is not there: apt-get install npm")
    context = chromium.new_context(color_scheme="dark")
    context.add_init_script(OPEN_DRAWINGS)
    page = context.new_page()
    page.goto(address + place("architecture.md", "en"))
    page.wait_for_function(SETTLED, timeout=20_000)
    colours = page.evaluate(COLOURS_OF_ARROWS)
    context.close()
    assert len(colours) == 2
    assert all(line == head for line, head in colours), colours


def test_code_is_copied_from_a_phone_as_it_is_written(window, address):
    page, problems = window
    problems.clear()
    page.set_viewport_size(dict(zip(("width", "height"), SIZES["phone"])))
    page.goto(address + place("tutorials/gpt.md", "en"))
    page.wait_for_function(SETTLED, timeout=20_000)
    code = "document.querySelectorAll('article .language-python pre > code')[1]"
    page.evaluate(f"{code}.setAttribute('data-md-copying', '')")  # as the theme's button does before it reads the text
    copied = page.evaluate(f"{code}.innerText")
    page.evaluate(f"{code}.removeAttribute('data-md-copying')")
    selected = page.evaluate(f"{{ getSelection().selectAllChildren({code}); }} getSelection().toString()")
    script = (ROOT / "tutorials" / "train_gpt.py").read_text(encoding="utf-8")
    load = script.split("# --8<-- [start:load]\n")[1].split("    # --8<-- [end:load]")[0]
    assert copied.strip() == selected.strip() == textwrap.dedent(load).strip()
    assert problems == []

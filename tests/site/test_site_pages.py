"""Every page is there in every language, and everything on it leads somewhere."""

from __future__ import annotations

import ast
import json
import re

import pytest
from site_pages import DOCS, LANGUAGES, ROOT, nav_pages, place, source_pages

from moreh import option as public_option
from moreh_ap import errors

HANGUL = re.compile(r"[가-힣]")

OTHER_WORDS = {
    "그래디언트": "기울기",
    "경사도": "기울기",
    "머신": "장비",
    "기계에서": "장비에서",
    "층 ": "레이어",
    "너비": "폭",
    "순전파와 역방향": "순전파와 역전파",
    "스텝을 밟": "스텝을 진행",
    "최적화기": "옵티마이저",
    "쪼개": "분할",
    "해요.": "합니다.",
    "세요.": "십시오.",
}
"""Words and endings that Korean pages do not use, and those of the glossary in their place."""


def test_languages_have_the_same_pages():
    pages = source_pages()
    assert sorted(pages["en"] - pages["ko"]) == [], "not translated"
    assert sorted(pages["ko"] - pages["en"]) == [], "translated, but not there in English"


def test_navigation_has_every_page():
    assert source_pages()["en"] <= set(nav_pages())


def test_every_title_of_the_navigation_is_translated():
    """Names of models and methods are the same in both languages."""
    languages, navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")
    names = {"GPT", "Mistral", "Llama2", "Llama3 70B", "LoRA", "LLM"}
    titles = set(re.findall(r'^\s*- "?([^":\n]+)"?:', navigation, re.MULTILINE)) - names
    assert len(titles) >= 30
    translated = set(re.findall(r'^ {12}"?([^":\n]+)"?: \S', languages, re.MULTILINE))
    assert titles - translated == set()


def test_the_addresses_of_site_and_repository_are_given_at_the_build(monkeypatch):
    load_config = pytest.importorskip("mkdocs.config").load_config
    pytest.importorskip("mkdocs_static_i18n")
    assert [load_config(str(ROOT / "mkdocs.yml"))[name] for name in ("site_url", "repo_url")] == ["", ""]
    monkeypatch.setenv("SITE_URL", "https://docs.example.org/ap/")
    monkeypatch.setenv("REPO_URL", "https://example.org/team/moreh_ap")
    config = load_config(str(ROOT / "mkdocs.yml"))
    assert config["site_url"] == "https://docs.example.org/ap/"
    assert config["repo_url"] == "https://example.org/team/moreh_ap"


def test_build_says_no_warning(site):
    assert [line for line in site.log.splitlines() if line.startswith(("WARNING", "ERROR"))] == []


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_page_is_there_in_its_language(site, language):
    problems = []
    for name in nav_pages():
        file = site.folder / place(name, language) / "index.html"
        if not file.exists():
            problems.append(f"{name}: missing")
        elif site.page(file).language != language:
            problems.append(f"{name}: <html lang={site.page(file).language!r}>")
        elif bool(HANGUL.search(site.page(file).text)) != (language == "ko"):
            problems.append(f"{name}: the text is in another language")
        elif site.page(file).text.lstrip().startswith("{"):
            problems.append(f"{name}: raw JSON")
    assert problems == []


def test_links_lead_to_pages_and_anchors_that_exist(site):
    problems = []
    for file in site.files():
        for link in site.page(file).links:
            target = site.target(file, link)
            if target is None:
                continue
            found, anchor = target
            if not found.exists():
                problems.append(f"{file.relative_to(site.folder)}: {link}")
            elif anchor and found.suffix == ".html" and anchor not in site.page(found).ids:
                problems.append(f"{file.relative_to(site.folder)}: {link} (no such anchor)")
    assert problems == []


def test_images_exist_and_are_described(site):
    problems, num_images = [], 0
    for file in site.files():
        for image in site.page(file).images:
            target = site.target(file, image)
            num_images += 1
            if target is None:
                problems.append(f"{file.relative_to(site.folder)}: {image} is on another server")
            elif not target[0].exists():
                problems.append(f"{file.relative_to(site.folder)}: {image}")
    assert problems == []
    assert num_images >= 2


def test_search_index_has_every_page(site):
    index = json.loads((site.folder / "search" / "search_index.json").read_text(encoding="utf-8"))
    found = {entry["location"] for entry in index["docs"]}
    expected = {place(name, language) for language in LANGUAGES for name in nav_pages()}
    assert expected - found == set()
    assert set(index["config"]["lang"]) == set(LANGUAGES)
    assert "micro_batches" in " ".join(entry["text"] for entry in index["docs"])


def test_links_in_errors_lead_to_sections(site):
    texts = {text for file in (ROOT / "moreh_ap").rglob("*.py") for text in _strings(file) if text.startswith("docs/")}
    links = {text for text in texts if re.fullmatch(r"docs/[\w/-]+\.md(#[\w-]+)?", text)}
    links |= {f"docs/errors.md#{cls.__name__.lower()}" for cls in vars(errors).values() if isinstance(cls, type)}
    assert len(links) >= 10
    for link in sorted(links):
        page, _, anchor = link.removeprefix("docs/").partition("#")
        for language in LANGUAGES:
            file = site.folder / place(page, language) / "index.html"
            assert file.exists(), f"{link} in {language}"
            assert not anchor or anchor in site.page(file).ids, f"{link} in {language}"


def test_api_reference_has_every_public_name(site):
    offered = next(
        node.body[0].names + node.body[1].names
        for node in ast.parse((ROOT / "moreh_ap" / "__init__.py").read_text(encoding="utf-8")).body
        if isinstance(node, ast.If)
    )
    names = {f"torch.moreh.option.{name}" for name in public_option.__all__}
    names |= {f"moreh_ap.errors.{cls.__name__}" for cls in vars(errors).values() if isinstance(cls, type)}
    names |= {f"moreh_ap.{alias.name}" for alias in offered} | {"moreh_ap.plan.Plan", "transformers.AdamW"}
    for language in LANGUAGES:
        page = site.page(site.folder / place("reference/api.md", language) / "index.html")
        assert names - page.ids == set()


def test_korean_pages_use_one_word_for_a_term():
    pages = [DOCS / name.replace(".md", ".ko.md") for name in source_pages()["ko"]]
    pages += (ROOT / "tutorials" / "notebooks").glob("*.ko.md")
    assert len(pages) >= 30
    problems = []
    for page in pages:
        prose = re.sub(r"^(```+).*?^\1|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        problems += [f"{page.name}: {word}, not {right}" for word, right in OTHER_WORDS.items() if word in prose]
    assert problems == []


def test_nothing_is_left_to_fill_in():
    """What a model wrote, and a page quotes, may have its own."""
    left = {}
    for page in [*DOCS.rglob("*.md"), ROOT / "README.md"]:
        text = page.read_text(encoding="utf-8")
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        left[page.name] = re.findall(r"@[A-Z][A-Z0-9_]+@", text) + re.findall(r"\bTODO\b|\bTBD\b", prose)
    assert {name: words for name, words in left.items() if words} == {}


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "tutorials/README.md", "tutorials/manual/README.md"])
def test_links_of_pages_outside_the_site(name):
    page = ROOT / name
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_code_on_pages_comes_from_files_that_exist():
    """The build fails on a missing file; a path in prose is only text, so it is looked at here."""
    pattern = re.compile(r"`((?:moreh_ap|moreh|scripts|tutorials|tests|docs)/[\w./-]+\.(?:py|md|json|sh))`")
    problems = []
    for page in [*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        for path in pattern.findall(page.read_text(encoding="utf-8")):
            if not (ROOT / path).exists():
                problems.append(f"{page.relative_to(ROOT)}: {path}")
    assert problems == []


def _strings(file) -> list[str]:
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]

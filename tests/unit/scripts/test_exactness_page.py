"""The page of families and plans is what the results give, in every language of the site."""

from __future__ import annotations

import json
import re
import string
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[3]
LANGUAGES = ("", ".ko")


@pytest.fixture(scope="module")
def tools():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        import exactness_page
        import exactness_words

        yield SimpleNamespace(page=exactness_page, words=exactness_words.LANGUAGES)


@pytest.fixture(scope="module")
def entries(tools):
    return json.loads(tools.page.RESULTS.read_text(encoding="utf-8"))


def tables(page):
    """Returns every table of a page as lists of cells."""
    found = re.findall(r"(?:^\|.*\|\n)+", page, re.MULTILINE)
    return [[[cell.strip() for cell in row[1:-1].split(" | ")] for row in one.splitlines()] for one in found]


def anchors(page):
    """Returns what links can point to: explicit anchors, else the text as Python-Markdown makes it one."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page, flags=re.DOTALL), re.MULTILINE)
    explicit = [re.search(r"\{ #([\w-]+) \}$", title) for title in titles]
    return [
        found[1] if found else re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")
        for title, found in zip(titles, explicit)
    ]


def entry(family, verdict, **more):
    values = {"class": "", "plan": "tensor", "text": "tensor=2", "note": "", "seconds": 30.0, "date": "2026-01-02"}
    versions = {"python": "3.12", "torch": "2.13", "transformers": "5.23"}
    return {"family": family, "verdict": verdict, **values, **versions, **more}


def test_every_language_has_the_same_words_and_blanks(tools):
    assert tuple(tools.words) == LANGUAGES
    english = tools.words[""]

    def blanks(text):
        return sorted(field for _, field, _, _ in string.Formatter().parse(text) if field)

    for words in tools.words.values():
        assert list(words) == list(english)
        for key in ("head", "held", "count", "days", "minutes"):
            assert blanks(words[key]) == blanks(english[key]), key


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_committed_page_is_what_the_results_give(tools, entries, language):
    file = tools.page.PAGE.with_suffix(f"{language}.md")
    page = file.read_text(encoding="utf-8")
    assert page == tools.page.page_of(entries, tools.words[language]), "run scripts/exactness_page.py"


def test_languages_have_the_same_anchors_and_figures(tools, entries):
    english, korean = (tools.page.page_of(entries, tools.words[language]) for language in LANGUAGES)
    assert anchors(korean) == anchors(english)
    assert len(anchors(english)) == 6
    assert re.search("[가-힣]", english) is None
    verdicts = [(tools.words[".ko"][name], tools.words[""][name]) for name in ("refused", "whole")]
    pairs = list(zip(tables(english), tables(korean), strict=True))
    for one, other in pairs:
        assert [len(row) for row in one] == [len(row) for row in other]
    for one, other in pairs[-3:]:
        for row, translated in zip(one[1:], other[1:], strict=True):
            for word, said in verdicts:
                translated = [cell.replace(word, said) for cell in translated]
            assert translated == row


@pytest.mark.parametrize("language", LANGUAGES)
def test_what_is_not_exact_stands_out(tools, language):
    words = tools.words[language]
    page = tools.page.page_of(
        [
            entry("gpt2", "exact", loss=0.0, gradient=2e-6, weight=3e-6),
            entry("bert", "exact", loss=1e-7, gradient=2e-6, weight=3e-6, note="whole"),
            entry("opt", "wrong", loss=0.5, gradient=0.25, weight=0.125, note="a | b\nc", date="2026-01-04"),
            entry("t5", "failed", note="no answer"),
            entry("convnet", "refused", note="tensor=2 would split nothing"),
        ],
        words,
    )
    of = words["held"].format(held=2, asked=4)
    assert f"| tensor | `tensor=2` | {of} | 1 | 1e-07 | 2e-06 | 3e-06 |" in page
    assert f"| opt | `tensor=2` | {words['wrong']} | a \\| b c |" in page
    assert f"| t5 | `tensor=2` | {words['failed']} | no answer |" in page
    assert "| convnet | `tensor=2` | tensor=2 would split nothing |" in page
    assert "open" in anchors(page)
    losses = {row[0]: row[1] for row in tables(page)[4][2:]}
    assert losses == {
        "gpt2": "0",
        "bert": f"1e-07 {words['whole']}",
        "opt": f"**{words['wrong']}** 5e-01",
        "t5": f"**{words['failed']}**",
        "convnet": words["refused"],
    }
    assert words["days"].format(first="2026-01-02", last="2026-01-04") in page


def test_check_asks_for_the_page_in_every_language(tools, tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    arguments = ["exactness_page.py", "--page", str(page), "--verified-kinds", str(tmp_path / "verified_kinds.json")]
    monkeypatch.setattr("sys.argv", arguments)
    assert tools.page.main() == 0
    monkeypatch.setattr("sys.argv", [*arguments, "--check"])
    assert tools.page.main() == 0
    korean = tmp_path / "page.ko.md"
    korean.write_text(korean.read_text(encoding="utf-8") + "x", encoding="utf-8")
    assert tools.page.main() == 1
    assert "page.ko.md is not what" in capsys.readouterr().err

"""The page of what is replaced is what the registries say, in every language of the site."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def tool():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        import replacements_page

        yield replacements_page


@pytest.fixture(scope="module")
def lists(tool):
    return tool.registries()


def rows(text):
    return {line for line in text.splitlines() if line.startswith("| `")}


@pytest.mark.parametrize("language", ["", ".ko"])
def test_the_page_is_what_the_registries_say(tool, lists, language):
    page = tool.PAGE.with_suffix(f"{language}.md").read_text(encoding="utf-8")
    expected = tool.page_of(*lists, tool.LANGUAGES[language])
    if torch.version.cuda is None:
        assert page == expected, "run scripts/replacements_page.py"
    else:  # PyTorch with CUDA keeps a few functions of its profilers
        assert rows(expected) < rows(page), "run scripts/replacements_page.py with PyTorch without CUDA"


def test_every_change_has_a_target_an_effect_and_a_reason_of_one_line(lists):
    for patch in (patch for patches in lists for patch in patches):
        assert "." in patch.target
        for text in (patch.effect, patch.reason):
            assert text.strip() == text and text.endswith(".") and "\n" not in text, patch

"""The embedded summaries: which docstrings become rows, and on which side of the split."""

from __future__ import annotations

from pathlib import Path

import pytest
from embedded_data import is_held_out
from embedded_summaries import build_summaries, split_docstring, summaries_of_module

PROSE = (
    "The file is opened when the first line is written, not before. Lines are collected in memory until there are a "
    "hundred of them, and are written together then. Closing the object writes what is left of them, and an object "
    "that is never closed loses what it holds."
)


def docstring(first: str = "Write lines to a :class:`File` slowly.", rest: str = PROSE) -> str:
    return f"{first}\n\n{rest}"


def test_the_article_is_the_prose_after_the_first_line_and_ends_where_something_else_begins() -> None:
    assert split_docstring(docstring()) == (PROSE, "Write lines to a File slowly.")
    for other in (
        ">>> f()",
        "Parameters\n----------\nx : int",
        "Args:\n    x: A number.",
        "- one\n- two",
        ".. note:: x",
    ):
        assert split_docstring(f"{docstring()}\n\n{other}\n\n{PROSE}") == (PROSE, "Write lines to a File slowly.")


@pytest.mark.parametrize(
    ("first", "rest"),
    [
        ("Short.", PROSE),
        ("Write lines to a file without an end", PROSE),
        ("Write lines to a file | another one.", PROSE),
        ("Write lines to a file, slowly.", "Too little to summarise. Really."),
        ("Write lines to a file, slowly.", PROSE.replace(". ", ", ").replace("before, ", "before ")),
        ("Write lines to a file, slowly.", PROSE * 12),
        ("Write lines to a file, slowly.", PROSE.replace("memory", "m\u00e9moire")),
        ("Write lines to a file, slowly.", "Copyright somebody. " + PROSE),
    ],
)
def test_what_gives_no_row(first: str, rest: str) -> None:
    assert split_docstring(docstring(first, rest)) == ("", "")


def test_modules_classes_and_functions_give_rows() -> None:
    text = f'"""{docstring("A module that writes lines slowly.")}"""\n'
    text += f'class A:\n    """{docstring("A class that writes lines slowly.", PROSE + " Yes.")}"""\n'
    text += f'    def f(self):\n        """{docstring("A method that writes lines slowly.", PROSE + " No.")}"""\n'
    assert [row.highlights.split()[1] for row in summaries_of_module("m", text)] == ["module", "class", "method"]
    assert list(summaries_of_module("m", "def broken(:")) == []


def test_texts_are_kept_once_and_split_by_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "toy_summaries"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('nothing may be imported')\n")
    for number in range(60):
        text = docstring(f"Write lines to file number {number}.", f"Number {number}. {PROSE}")
        (folder / f"module_{number}.py").write_text(f'"""{text}"""\n')
        (folder / f"again_{number}.py").write_text(f'"""{text}"""\n')
    monkeypatch.syspath_prepend(tmp_path)
    train, held_out = build_summaries(["toy_summaries"])
    assert len(train) + len(held_out) == 60
    assert held_out and all(is_held_out(row.module) for row in held_out)
    assert not any(is_held_out(row.module) for row in train)
    assert build_summaries(["toy_summaries"]) == (train, held_out)
    assert sum(map(len, build_summaries(["toy_summaries"], max_rows=9))) == 9
    with pytest.raises(ValueError, match="no_such_package"):
        build_summaries(["no_such_package"])


def test_this_installation_gives_enough_rows() -> None:
    train, held_out = build_summaries(["huggingface_hub", "datasets"])
    assert len(train) > 100 and len(held_out) > 5

"""The embedded data set: which functions become rows, how, and on which side of the split."""

from __future__ import annotations

import ast
from pathlib import Path

import embedded_data
import pytest
from embedded_data import build_rows, instruct, is_held_out, rows_of_module, summarise

AREA = '''
@lru_cache(maxsize=None)
def area(width: float, height: float = 1.0) -> float:
    """Returns the area of a :class:`Rectangle` in square metres.

    More words that nobody needs.
    """
    # both sides are positive
    product = width * height
    return product
'''


@pytest.fixture
def toy_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An importable package `toy_package` with no module yet."""
    folder = tmp_path / "toy_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('nothing may be imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def function(
    name: str, body: str = "return sum(values) + len(values)", summary: str = "Return the sum of all values given."
) -> str:
    return f'def {name}(values):\n    """{summary}"""\n    total = 0\n    {body}\n'


def rows_of(text: str) -> list[embedded_data.Row]:
    return [row for row, _ in rows_of_module("a.module", text)]


def test_a_row_is_an_instruction_and_the_source_without_docstring_and_decorator() -> None:
    (row,) = rows_of(AREA)
    assert "`area(width, height=1.0)`" in row.instruction
    assert "the area of a `Rectangle` in square metres" in row.instruction
    assert row.output == (
        "def area(width: float, height: float = 1.0) -> float:\n"
        "    # both sides are positive\n    product = width * height\n    return product"
    )


@pytest.mark.parametrize(
    ("docstring", "summary"),
    [
        ("Returns the ``n`` largest items of a list.", "return the `n` largest items of a list"),
        ("Copy a file, e.g. a big one, to a folder. Slow.", "copy a file, e.g. a big one, to a folder"),
        ("Applies a function\n    to every item of it.\n\n    Rest.", "apply a function to every item of it"),
        ("Pushes a new item onto the stack of items", "push a new item onto the stack of items"),
        ("The largest of all the items that it holds.", None),  # does not begin with a verb
        ("Return it.", None),  # says too little
        ("Return a value; this is deprecated since 1.0.", None),
        ("Return " + "very " * 80 + "much.", None),
    ],
)
def test_summary_is_the_first_sentence_from_the_verb_on(docstring: str, summary: str | None) -> None:
    assert summarise(docstring) == summary


def test_instruction_changes_the_form_of_the_verb_only_where_it_is_the_only_one() -> None:
    one_verb = {instruct("f(x)", "apply x to the list", chooser=str(number)) for number in range(50)}
    assert one_verb == {
        "Write a Python function `f(x)` that applies x to the list.",
        "Write a Python function `f(x)` to apply x to the list.",
        "Implement `f(x)` in Python. It should apply x to the list.",
    }
    two_verbs = {instruct("f(x)", "apply x and return it", chooser=str(number)) for number in range(50)}
    assert two_verbs == {
        "Write a Python function `f(x)` to apply x and return it.",
        "Implement `f(x)` in Python. It should apply x and return it.",
    }


@pytest.mark.parametrize(
    "text",
    [
        function("_private"),
        function("test_sum"),
        "@app.route('/')\n" + function("handler"),
        function("abstract", body="raise NotImplementedError('a subclass must write this one itself')"),
        function("long", body="\n    ".join(f"value_{i} = {i}" for i in range(100))),
        function("undocumented").replace('"""Return the sum of all values given."""', ""),
        "class Box:\n    " + function("method").replace("\n", "\n    "),
        "def broken(:\n",
    ],
)
def test_what_gives_no_row(text: str) -> None:
    assert rows_of(function("suitable")), "the function that the cases vary must itself give a row"
    assert rows_of(text) == []


def test_equal_functions_give_one_row_and_files_are_never_imported(toy_package: Path) -> None:
    (toy_package / "first.py").write_text(function("total"))
    (toy_package / "second.py").write_text(function("renamed").replace("total = 0", "total  =  0  # a comment"))
    (toy_package / "other.py").write_text(function("other", body="return max(values) - min(values) + total"))
    (toy_package / "tests").mkdir()
    (toy_package / "tests" / "skipped.py").write_text(
        function("skipped", body="return [2 * value for value in values]")
    )
    train, held_out = build_rows(["toy_package"])
    names = sorted(ast.parse(row.output).body[0].name for row in train + held_out)  # type: ignore[attr-defined]
    assert names == ["other", "total"]


def test_the_split_goes_by_module_and_is_the_same_every_time(toy_package: Path) -> None:
    for number in range(60):
        text = "\n".join(
            function(f"f{number}_{part}", body=f"return values[{number}:{part}] + values") for part in (1, 2)
        )
        (toy_package / f"module_{number}.py").write_text(text)
    train, held_out = build_rows(["toy_package"])
    assert len(train) + len(held_out) == 120
    assert held_out and len(held_out) < len(train)
    assert {row.module for row in train}.isdisjoint(row.module for row in held_out)
    assert all(is_held_out(row.module) for row in held_out)
    assert build_rows(["toy_package"]) == (train, held_out)
    fewer_train, fewer_held_out = build_rows(["toy_package"], max_rows=30)
    assert len(fewer_train) + len(fewer_held_out) == 30
    assert set(fewer_train) <= set(train)


def test_a_source_that_is_not_installed_is_an_error_only_when_it_is_the_only_one(toy_package: Path) -> None:
    (toy_package / "module.py").write_text(function("total"))
    assert sum(map(len, build_rows(["no_such_package", "toy_package"]))) == 1
    with pytest.raises(ValueError, match="no_such_package"):
        build_rows(["no_such_package"])


def test_the_standard_library_gives_rows_that_parse() -> None:
    train, held_out = build_rows([embedded_data.STANDARD_LIBRARY])
    assert len(train) > 200 and len(held_out) > 5
    for row in train + held_out:
        (definition,) = ast.parse(row.output).body
        assert isinstance(definition, ast.FunctionDef)
        assert ast.get_docstring(definition) is None
        assert f"`{definition.name}(" in row.instruction

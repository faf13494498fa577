"""Writes docs/reference/api.md and api.ko.md from the signatures and docstrings of what users may import.

    python scripts/api_reference.py      # `make docs` runs it; the pages are not in the repository

Decides which names are public and how a docstring becomes Markdown. Reads the source with `ast` and imports nothing of
the package. Docstrings stay in English on both pages. Must not know what the names do.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "reference"
LINE = 100
"""Columns after which a signature is written one argument a line."""

WORDS = {
    "en": {
        "title": "API",
        "intro": "Everything that a script may import. The page is made from the docstrings by "
        "`scripts/api_reference.py` when the site is built. Names that are not here may change at any time.",
        "name": "name",
        "meaning": "meaning",
        "exception": "exception",
        "warning": "warning",
        "when": "when",
    },
    "ko": {
        "title": "API",
        "intro": "스크립트에서 가져다 쓸 수 있는 이름을 모두 모았습니다. 사이트를 만들 때 "
        "`scripts/api_reference.py`가 docstring에서 이 페이지를 생성하며, docstring은 영어 원문 그대로입니다. "
        "여기에 없는 이름은 언제든지 바뀔 수 있습니다.",
        "name": "이름",
        "meaning": "의미",
        "exception": "예외",
        "warning": "경고",
        "when": "발생하는 경우",
    },
}


@dataclass(frozen=True)
class Module:
    """One section of the page.

    Attributes:
        heading: What users write in front of the names.
        sources: The public names by the file that defines them; none means every public class of the file.
        members: Whether methods and properties of classes are public too.
        intro: A sentence for the section, by language.
    """

    heading: str
    sources: dict[str, tuple[str, ...]]
    members: bool
    intro: dict[str, str]


MODULES = (
    Module(
        "torch.moreh.option",
        {"moreh_ap/option.py": ("enable_advanced_parallelization",), "moreh_ap/settings.py": ("Options",)},
        False,
        {
            "en": "`import torch` provides it; `moreh.option` is the same module. All arguments in a table: "
            "[Advanced settings](../ap/advanced-settings.md).",
            "ko": "`import torch`만 하면 쓸 수 있고, `moreh.option`도 같은 모듈입니다. 인자를 모은 표는 "
            "[고급 설정](../ap/advanced-settings.md)에 있습니다.",
        },
    ),
    Module(
        "moreh_ap",
        {"moreh_ap/session/checkpoint/training_checkpoint.py": ("save", "load")},
        False,
        {
            "en": "See [Training checkpoints](../checkpoints.md).",
            "ko": "[학습 체크포인트](../checkpoints.md)를 참고하십시오.",
        },
    ),
    Module(
        "moreh_ap.device",
        {"moreh_ap/device/__init__.py": ("disable",)},
        False,
        {
            "en": "For notebooks: the end of an accelerator in a process that goes on.",
            "ko": "노트북을 위한 함수입니다. 프로세스를 끝내지 않고 가속기만 끝냅니다.",
        },
    ),
    Module(
        "moreh_ap.plan",
        {"moreh_ap/plan.py": ("Plan",)},
        True,
        {
            "en": "A plan as an object; its text is what logs print and `plan=` takes. What each value may be: "
            "[Plans](../ap/advanced-settings.md#plans).",
            "ko": "플랜을 나타내는 객체입니다. 로그에 출력되고 `plan=`에 넣는 문자열이 바로 이 객체의 텍스트입니다. "
            "각 항목에 쓸 수 있는 값은 [플랜](../ap/advanced-settings.md#plans)에 있습니다.",
        },
    ),
    Module(
        "moreh_ap.errors",
        {"moreh_ap/errors.py": ()},
        False,
        {
            "en": "What each one means: [Errors](../errors.md).",
            "ko": "각 오류의 의미는 [오류](../errors.md)에 있습니다.",
        },
    ),
    Module(
        "transformers",
        {"moreh_ap/integrations/adamw.py": ("AdamW",)},
        False,
        {
            "en": "Given to a transformers that has no such class any more: "
            "[when and how](../ap/advanced-settings.md#adamw).",
            "ko": "이 클래스가 없어진 transformers에 다시 넣어 줍니다. "
            "[언제, 어떻게](../ap/advanced-settings.md#adamw).",
        },
    ),
)


def page(language: str) -> str:
    """Returns the page in Markdown."""
    words = WORDS[language]
    parts = [f"# {words['title']}", words["intro"]]
    for module in MODULES:
        parts += [f"## {module.heading}", module.intro[language]]
        for node in definitions(module):
            parts += describe(node, module, words)
    return "\n\n".join(parts) + "\n"


def definitions(module: Module) -> list[ast.FunctionDef | ast.ClassDef]:
    """Returns the definitions of the module's public names, in its order.

    Raises:
        LookupError: A name is not defined there.
    """
    public = []
    for file, names in module.sources.items():
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        found = {node.name: node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        missing = [name for name in names if name not in found]
        if missing:
            raise LookupError(f"{file} defines no {', '.join(missing)}")
        public += [found[name] for name in names or found if not name.startswith("_")]
    return public


def describe(node: ast.FunctionDef | ast.ClassDef, module: Module, words: dict[str, str]) -> Iterator[str]:
    """Yields the blocks that say what one name is."""
    full = f"{module.heading}.{node.name}"
    yield f"### {node.name} {{ #{full} }}"
    yield fenced(signature(node, full))
    yield from docstring(node, words)
    if module.members and isinstance(node, ast.ClassDef):
        for member in node.body:
            if isinstance(member, ast.FunctionDef) and not member.name.startswith("_"):
                yield f"#### {node.name}.{member.name} {{ #{full}.{member.name} }}"
                yield fenced(signature(member, f"{node.name}.{member.name}"))
                yield from docstring(member, words)


def signature(node: ast.FunctionDef | ast.ClassDef, name: str) -> str:
    """Returns how a name is called, as Python; for a property only its name and type."""
    if isinstance(node, ast.ClassDef):
        makers = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
        if makers:
            return signature(makers[0], name)
        if any(ast.unparse(one).startswith("dataclass") for one in node.decorator_list):
            return call(name, ", ".join(field(one) for one in node.body if isinstance(one, ast.AnnAssign)))
        return f"class {name}({', '.join(ast.unparse(base) for base in node.bases)})"
    decorators = {ast.unparse(one) for one in node.decorator_list}
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    if "property" in decorators:
        return f"{name}{returns.replace(' -> ', ': ')}"
    bound = [one for one in node.args.args if one.arg not in ("self", "cls")]
    node.args.args = bound
    return call(name, ast.unparse(node.args), returns)


def call(name: str, arguments: str, returns: str = "") -> str:
    """Returns ``name(arguments)`` in one line, or one argument a line where that is too long."""
    parts = [re.sub(r"^(\w+: .+?)=(?!.*\]$)", r"\1 = ", one) for one in top_level_parts(arguments)]
    short = f"{name}({', '.join(parts)}){returns}"
    if len(short) <= LINE:
        return short
    return f"{name}(\n" + "".join(f"    {one},\n" for one in parts) + f"){returns}"


def field(node: ast.AnnAssign) -> str:
    """Returns a field of a dataclass as an argument; a default that is made later is written as dots."""
    text = f"{ast.unparse(node.target)}: {ast.unparse(node.annotation)}"
    value = node.value
    if isinstance(value, ast.Call):  # field(default=...)
        value = next((one.value for one in value.keywords if one.arg == "default"), None)
    if value is None:
        return text
    return f"{text}={'...' if isinstance(value, ast.Name) else ast.unparse(value)}"


def top_level_parts(text: str) -> list[str]:
    """Returns the parts between the commas that are in no bracket."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def docstring(node: ast.FunctionDef | ast.ClassDef, words: dict[str, str]) -> Iterator[str]:
    """Yields the Markdown of a docstring in Google form.

    Raises:
        LookupError: There is none, and a public name without one is a mistake.
    """
    text = ast.get_docstring(node)
    if not text:
        raise LookupError(f"{node.name} has no docstring")
    pieces = re.split(r"^(Args|Attributes|Returns|Raises|Warns|Example|Source):[ \t]*", text, flags=re.MULTILINE)
    yield in_markdown(pieces[0].strip())
    for title, body in zip(pieces[1::2], pieces[2::2]):
        body = inspect.cleandoc(body)
        if title in ("Args", "Attributes"):
            yield table(body, words["name"], words["meaning"])
        elif title in ("Raises", "Warns"):
            yield table(body, words["exception" if title == "Raises" else "warning"], words["when"])
        elif title == "Example":
            yield fenced(body.strip(), "pycon")
        else:
            yield f"**{title}:** {' '.join(body.split())}"


def table(body: str, left: str, right: str) -> str:
    """Returns the entries ``name: meaning`` as a table; a deeper line belongs to the entry before it."""
    entries = re.split(r"\n(?=\S)", body.strip())
    lines = [f"| {left} | {right} |", "|---|---|"]
    for entry in entries:
        name, meaning = entry.split(":", 1)
        lines.append(f"| `{name.strip()}` | {' '.join(in_markdown(meaning).split())} |")
    return "\n".join(lines)


def in_markdown(text: str) -> str:
    """Returns prose with formulas as code, and with no bar that would end a table's cell."""
    displayed = re.sub(r"\$\$(.+?)\$\$", r"```latex\n\1\n```", text, flags=re.DOTALL)
    return re.sub(r"\$([^$]+)\$", r"`\1`", displayed).replace("|", "\\|")


def fenced(text: str, language: str = "python") -> str:
    """Returns the text as a block of code."""
    return f"```{language}\n{text}\n```"


def main() -> None:
    """Writes both pages."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for language, suffix in (("en", ""), ("ko", ".ko")):
        (FOLDER / f"api{suffix}.md").write_text(page(language), encoding="utf-8")


if __name__ == "__main__":
    main()

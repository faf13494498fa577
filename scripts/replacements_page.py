"""Writes docs/reference/replacements.md and its Korean page: what is replaced in other libraries, from the registries.

    python scripts/replacements_page.py            # writes the page in each language
    python scripts/replacements_page.py --check    # writes nothing; exits with 1 if a page is out of date

Makes all changes in this process, reads the registries, and takes the changes back. Needs PyTorch without CUDA: with it
a few functions of its profilers are not replaced.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from moreh_ap.device import checkpoint_tensors
from moreh_ap.device.host_tensors import HOST
from moreh_ap.device.patches.install import install
from moreh_ap.integrations import accelerate, transformers
from moreh_ap.patching import Patch
from moreh_ap.runtime.worker import worker_patches
from moreh_ap.session.models.remote_optimizer import elementwise_optimizers

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "replacements.md"
_LATE = (
    "accelerate.utils.operations",
    "torch.distributed.fsdp",
    "torch.onnx",
    "torch.utils.data",
    "transformers.cache_utils",
    "transformers.feature_extraction_utils",
    "transformers.modeling_utils",
    "transformers.tokenization_utils_base",
)
"""Modules that are changed when they are imported, or their packages."""


class Words(NamedTuple):
    """The words of the page in one language."""

    title: str
    introduction: str
    controller: str
    worker: str
    head: str
    call_sites: str


ENGLISH = Words(
    "# What is replaced",
    """From the one line until `moreh_ap.device.disable()`, these attributes and tables of other libraries are ours. A
test compares every attribute of every loaded module of PyTorch and transformers before the line and after `disable()`.
In a process that the script forks, such as a loader worker, the changes are undone at once.

This page is written from the registries in the code by `scripts/replacements_page.py`. The private names of other
libraries that the code uses are in `moreh_ap/private_names.py`.
""",
    "## In the script's process { #controller }",
    "## In a worker { #worker }",
    "| target | effect |\n|---|---|",
    """## Where callers' lines are looked at { #call-sites }

No caller's frame and no reference count decides what is computed. Two functions look at the stack:

| function | for |
|---|---|
| `session.script_line.warn` | a warning names the line of the script |
| `parallelizer.loss.loss_reduction` | ranks compare the lines of a forward at which they take means or gather rows; \
if they differ, no result is used |
""",
)
KOREAN = Words(
    "# 바꾸는 것 { #what-is-replaced }",
    """한 줄을 실행한 뒤 `moreh_ap.device.disable()`을 호출할 때까지는, 아래에 적은 다른 라이브러리의 속성과 표가
이 패키지의 것으로 바뀌어 있습니다. 테스트 하나가 PyTorch와 transformers에서 불러온 모든 모듈의 모든 속성을 한 줄을
실행하기 전과 `disable()`을 호출한 뒤에 비교합니다. 로더 워커처럼 스크립트가 fork한 프로세스에서는 바로 되돌립니다.

이 페이지는 `scripts/replacements_page.py`가 코드의 목록을 읽어 만듭니다. 표의 설명은 코드에 있는 영어 그대로입니다.
코드에서 사용하는 다른 라이브러리의 비공개 이름은 `moreh_ap/private_names.py`에 있습니다.
""",
    "## 스크립트의 프로세스에서 { #controller }",
    "## 워커에서 { #worker }",
    "| 대상 | 하는 일 |\n|---|---|",
    """## 호출한 줄을 보는 곳 { #call-sites }

무엇을 계산할지 정할 때 호출한 프레임이나 참조 횟수는 보지 않습니다. 스택을 살펴보는 함수는 두 개입니다.

| 함수 | 목적 |
|---|---|
| `session.script_line.warn` | 경고가 스크립트의 줄을 알려 줍니다 |
| `parallelizer.loss.loss_reduction` | 랭크들이 평균을 구하거나 행을 모으는 forward의 줄을 서로 비교하고, \
다르면 그 결과를 쓰지 않습니다 |
""",
)
LANGUAGES = {"": ENGLISH, ".ko": KOREAN}


class _NoWorkers(mock.MagicMock):
    """A backend for which functions are wrapped and nothing is called."""

    def optimizer_classes(self) -> Any:
        return elementwise_optimizers()

    def step_on_workers(self, step: Any) -> Any:
        return functools.wraps(step)(lambda *args: step(*args))

    zero_grad_on_workers = clip_on_workers = step_on_workers


def registries() -> tuple[list[Patch], list[Patch]]:
    """Makes all changes of the controller, takes them back, then those of a worker; returns what was noted of each."""
    for name in _LATE:
        importlib.import_module(name)
    patches = install(_NoWorkers())
    try:
        transformers.install(patches, checkpoint_tensors)
        accelerate.install(patches)
        HOST.begin()
        controller = list(patches)
    finally:
        patches.undo()
    patches = worker_patches.install()
    worker = list(patches)
    patches.undo()
    return controller, worker


def page_of(controller: Iterable[Patch], worker: Iterable[Patch], words: Words) -> str:
    """Returns the page."""
    parts = [words.title, words.introduction, words.controller, *_tables(controller, words)]
    parts += [words.worker, *_tables(worker, words), words.call_sites]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _tables(patches: Iterable[Patch], words: Words) -> Iterator[str]:
    """Yields a reason and a table for each group."""
    groups: dict[str, dict[str, list[str]]] = {}
    for patch in patches:
        holder, _, name = patch.target.rpartition(".")
        groups.setdefault(patch.reason, {}).setdefault(f"{holder}|{patch.effect}", []).append(name)
    for reason, rows in groups.items():
        yield reason
        lines = []
        for row, names in rows.items():
            holder, _, effect = row.partition("|")
            targets = ", ".join(f"`{name}`" for name in dict.fromkeys(names))
            lines.append(f"| `{holder}`: {targets} | {effect.replace('|', chr(92) + '|')} |")
        yield "\n".join([words.head, *lines])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    check, out_of_date = parser.parse_args().check, 0
    controller, worker = registries()
    for language, words in LANGUAGES.items():
        file, text = PAGE.with_suffix(f"{language}.md"), page_of(controller, worker, words)
        if not check:
            file.write_text(text, encoding="utf-8")
        elif file.read_text(encoding="utf-8") != text:
            print(f"{file} is not what the registries say; run scripts/replacements_page.py", file=sys.stderr)
            out_of_date = 1
    return out_of_date


if __name__ == "__main__":
    sys.exit(main())

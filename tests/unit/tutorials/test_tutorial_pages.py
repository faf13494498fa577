"""The pages of the tutorials: their parts, code that comes from the scripts, and messages that the scripts have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = ("gpt", "mistral", "llama2", "llama3-70b", "lora", "llm")
PARTS = [
    "Prepare",
    "Understand the code",
    "Fine-tune",
    "Check the result",
    "Change the number of devices",
    "Conclusion",
]
FINE_TUNING = {
    "gpt": "cerebras-gpt-13b",
    "mistral": "mistral-7b",
    "llama2": "llama2-13b",
    "llama3-70b": "llama3-70b",
    "lora": "mistral-7b-lora",
}
"""Pages of the fine-tuning tutorials, and the table of their model. They have one part more."""


def page(name: str) -> str:
    return (ROOT / "docs" / "tutorials" / f"{name}.md").read_text()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_its_parts_and_its_code_from_the_script(name: str) -> None:
    text = page(name)
    parts = [*PARTS[:-1], "Parameters to try", PARTS[-1]] if name in FINE_TUNING else PARTS
    assert re.findall(r"^## \d\. ([\w -]+?)(?: \{.*)?$", text, re.MULTILINE) == parts
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    sections = [re.fullmatch(r'--8<-- "([\w/.]+):(\w+)"\n', block) for block in blocks]
    assert len(sections) >= 2 and all(sections), "code that no test runs"
    for section in sections:
        script, label = section.groups()
        source = (ROOT / script).read_text()
        assert source.count(f"# --8<-- [start:{label}]\n") == source.count(f"# --8<-- [end:{label}]\n") == 1


@pytest.mark.parametrize("suffix", ["", ".ko"])
@pytest.mark.parametrize("name", FINE_TUNING)
def test_a_fine_tuning_page_shows_every_part_of_its_script_and_what_all_share(name: str, suffix: str) -> None:
    text = page(f"{name}{suffix}")
    code = re.findall(rf'"tutorials/train_{name.replace("-", "_")}.py:(\w+)"', text)
    more = {"lora": ["adapters", "save"]}.get(name, ["masks"])  # LoRA's masks are in its loop
    assert sorted(code) == sorted(["imports", "load", "data", *more, "loop"])
    parts = ["check-accelerator", "container", "by-hand", "switch-model", f"flavours/{FINE_TUNING[name]}"]
    parts += [] if name == "lora" else ["after-flavours"]  # the guide has no adapters
    shared = re.findall(r'^--8<-- "docs/shared/([\w/.-]+?)\.md"$', text, re.MULTILINE)
    assert shared == [f"{part}{suffix}" for part in (*parts, "parameters")]
    assert f'{{ #about-advanced-parallelism }}\n\n--8<-- "docs/shared/by-hand{suffix}.md"' in text
    by_hand = (ROOT / "docs" / "shared" / f"by-hand{suffix}.md").read_text()
    assert "--standalone --nnodes=1" in by_hand and "--nnodes=2" in by_hand and "$MASTER_ADDR" in by_hand


def test_a_training_script_is_short_and_all_of_them_share_one_module() -> None:
    names = {path.stem for path in (ROOT / "tutorials").glob("*.py")}
    started = {name for name in names if name.startswith(("train_", "inference_", "prepare_"))}
    assert names - started == {"tutorial_helpers", "own_script"}
    for name in started:
        text = (ROOT / "tutorials" / f"{name}.py").read_text()
        lines = [line for line in text.splitlines() if "--8<--" not in line]  # which no reader of a page sees
        assert len(lines) <= (134 if name == "train_llm" else 100), f"{name}: {len(lines)} lines"
        assert not re.search(r"^(?:from|import) (?:train|inference|prepare)_", "\n".join(lines), re.MULTILINE)


@pytest.mark.parametrize("name", PAGES)
def test_commands_on_a_page_name_files_and_targets_that_exist(name: str) -> None:
    commands = "\n".join(re.findall(r"^```bash\n(.*?)^```", page(name), re.MULTILINE | re.DOTALL))
    scripts = re.findall(r"python ((?:tutorials|scripts)/\w+\.py)", commands)
    assert scripts and all((ROOT / script).is_file() for script in scripts)
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([\w-]+)", page(name)):
        assert f"\n{target}: " in makefile

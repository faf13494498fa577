"""The table of private names is what the code uses, and each is in the installed libraries."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from moreh_ap.private_names import CHECKED_IN, GUARDED, PRIVATE_NAMES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def scan():
    spec = importlib.util.spec_from_file_location("private_uses", ROOT / "scripts" / "private_uses.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def used(scan):
    return scan.folders(scan.uses())


def test_every_private_name_in_the_code_is_in_the_table(scan, used):
    missing = {
        f"{name} in moreh_ap/{folder}"
        for name, folders in used.items()
        for folder in folders
        if not any(scan.means(name, row.name) and {folder, "*"} & {*row.folders} for row in PRIVATE_NAMES)
    }
    assert not missing, "run scripts/private_uses.py --write"


def test_every_row_is_used_where_it_says(scan, used):
    unused = {
        f"{row} (not in {folder})"
        for row in PRIVATE_NAMES
        for folder in row.folders
        if not any(scan.means(name, row.name) and folder in ("*", *folders) for name, folders in used.items())
    }
    assert not unused, "run scripts/private_uses.py --write"


def test_every_name_is_in_the_installed_libraries(scan):
    gone = []
    for row in (row for row in PRIVATE_NAMES if row.name not in GUARDED):
        try:
            scan.find(row.name)
        except (AttributeError, ImportError):
            gone.append(str(row))
    assert gone == []


def test_the_versions_are_those_that_are_installed_to_develop_with():
    pinned = re.findall(r"^(\w+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert CHECKED_IN.items() <= set(pinned)


def test_a_name_that_is_gone_is_told_from_one_that_objects_have(scan):
    assert scan.find("torch.nn.Module._parameters") is None
    assert scan.find("torch._C._swap_tensor_impl") is not None
    for gone in ("torch._C._no_such_function", "torch.nn.Module._no_such_attribute", "torch._no_such_module.name"):
        with pytest.raises(AttributeError):
            scan.find(gone)


def test_uses_of_every_form_are_found(scan, tmp_path):
    (tmp_path / "moreh_ap").mkdir()
    (tmp_path / "moreh_ap" / "some.py").write_text(
        "import torch\n"
        "from torch.overrides import _push_mode\n"
        "from torch.distributed.pipelining.stage import _PipelineStageBase\n"
        "class Own(_PipelineStageBase):\n"
        "    _own = 1\n"
        "    def _prepare_forward_infra(self): return self._own\n"
        "def run(tensor, replace):\n"
        "    replace(torch.cuda, '_lazy_init', None)\n"
        "    torch._C._swap_tensor_impl(tensor, tensor._base)\n"
        "    return getattr(tensor, '_is_param', False), '_forward_hooks'\n"
    )
    assert {(use.line, use.name) for use in scan.uses(tmp_path)} == {
        (2, "torch.overrides._push_mode"),
        (3, "torch.distributed.pipelining.stage._PipelineStageBase"),
        (6, "torch.distributed.pipelining.stage._PipelineStageBase._prepare_forward_infra"),
        (8, "torch.cuda._lazy_init"),
        (9, "torch._C._swap_tensor_impl"),
        (9, "._base"),
        (10, "._is_param"),
        (10, "._forward_hooks"),
    }

"""Models in a worker find one process, our code and PyTorch's own collectives the group."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from moreh_ap.parallelizer.surroundings import own_collectives
from moreh_ap.parallelizer.surroundings.own_collectives import ALONE, seeing_group
from moreh_ap.patching import Patches

ROOT = Path(__file__).parents[4]
TORCH = Path(torch.__file__).parent


# Code of PyTorch that a worker runs and that asks `torch.distributed` by the public name, and where it sees the group.
ASKS = {
    "distributed/pipelining/stage.py": "parallelizer/pipeline/schedules.py, seeing_group",
    "distributed/tensor/_tp_conv.py": "runtime/worker, seeing_group around operations on state",
    "distributed/tensor/_collective_utils.py": "a check in debugging, not run",
    "distributed/fsdp/_fully_shard/_fsdp_common.py": "a print in debugging, not run",
    "distributed/_functional_collectives.py": "point to point and permutations, not used",
    "distributed/c10d_logger.py": "what is logged of a collective that raised",
}


@pytest.fixture
def patches():
    installed = Patches()
    own_collectives.install(installed)
    yield installed
    installed.undo()


def test_a_process_in_a_group_looks_alone_but_for_what_sees_the_group(patches, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert [getattr(dist, name)() for name in ALONE] == list(ALONE.values())
        assert distributed_c10d.is_initialized()
        with seeing_group():
            assert dist.is_initialized()
        assert not dist.is_initialized()
        norm = torch.nn.SyncBatchNorm(3)  # refuses tensors on the CPU where it finds a group
        assert norm(torch.randn(4, 3)).shape == (4, 3)
    finally:
        dist.destroy_process_group()


def test_our_own_code_asks_where_the_functions_are_defined():
    for path in [*(ROOT / "moreh_ap" / "parallelizer").rglob("*.py"), *(ROOT / "moreh_ap" / "runtime").rglob("*.py")]:
        assert not list(_asking(path)), f"{path}: ask torch.distributed.distributed_c10d"


def test_it_is_known_who_in_pytorch_asks_by_the_public_name():
    used = ("pipelining", "tensor", "fsdp/_fully_shard", "_composable", "device_mesh.py", "_functional_collectives.py")
    files = {TORCH / "distributed" / "c10d_logger.py"}
    for name in used:
        path = TORCH / "distributed" / name
        files.update(path.rglob("*.py") if path.is_dir() else [path])
    asking = {str(path.relative_to(TORCH)) for path in files if any(_asking(path))}
    experimental = {name for name in asking if "/experimental/" in name or "/parallel/fsdp.py" in name}
    assert asking - experimental == set(ASKS)


def _asking(path):
    text = path.read_text(encoding="utf-8")
    if not any(f".{name}" in text for name in ALONE):
        return  # parsing every file takes seconds
    for node in ast.walk(ast.parse(text)):
        is_asked = isinstance(node, ast.Attribute) and node.attr in ALONE
        if is_asked and ast.unparse(node.value) in ("dist", "torch.distributed"):
            yield node.lineno

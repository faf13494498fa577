"""What a worker replaces: noted, and as before once it is undone."""

from __future__ import annotations

import dataclasses
import sys

import torch
import transformers.cache_utils
from torch.utils import _pytree as pytree

from moreh_ap.parallelizer.surroundings.own_collectives import ALONE
from moreh_ap.protocol.pytree import flatten
from moreh_ap.runtime.worker import worker_patches


def attributes():
    modules = [module for name, module in sys.modules.items() if name.split(".")[0] in ("torch", "transformers")]
    return {module.__name__: dict(vars(module)) for module in modules}


def test_everything_is_as_before_once_it_is_undone():
    @dataclasses.dataclass
    class Batch:
        rows: torch.Tensor

    patches = worker_patches.install()
    flatten(Batch(torch.ones(2)))  # what PyTorch loads at the first time is loaded before the comparison
    patches.undo()  # with classes that earlier tests of this process have registered
    before, nodes = attributes(), dict(pytree.SUPPORTED_NODES)
    patches = worker_patches.install()
    flatten(Batch(torch.ones(2)))
    assert transformers.cache_utils.DynamicCache in pytree.SUPPORTED_NODES
    assert Batch in pytree.SUPPORTED_NODES
    changed = {
        f"{name}.{key}"
        for name, now in attributes().items()
        for key in now.keys() & before.get(name, {}).keys()
        if before[name][key] is not now[key]
    }
    noted = {patch.target for patch in patches} | {"torch._dynamo.eval_frame._stance"}  # `torch.compiler.set_stance`
    assert {f"torch.distributed.{name}" for name in ALONE} <= changed <= noted
    patches.undo()
    assert all(now[key] is value for name, now in attributes().items() for key, value in before.get(name, {}).items())
    assert nodes == pytree.SUPPORTED_NODES

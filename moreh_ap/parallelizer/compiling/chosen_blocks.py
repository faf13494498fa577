"""Which blocks a script has compiled, and with which options.

Decides by the paths of modules. Must not know how blocks are compiled.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from moreh_ap.protocol.messages.compile_requests import CompileRequest, CompileRequests


def blocks_of_requests(
    module: nn.Module, blocks: Sequence[nn.Module], asked: CompileRequests
) -> list[tuple[CompileRequest, list[nn.Module]]]:
    """Returns the options that the script has given, each with the blocks that they are for.

    A module's options are for all blocks inside it, and for itself if it is one. Of several the innermost counts.

    Args:
        module: The whole model.
        blocks: Its blocks here.
        asked: What the script has compiled; empty: the model, with the defaults.
    """
    if not asked:
        return [(CompileRequest(), list(blocks))]
    path_of = {id(submodule): path for path, submodule in module.named_modules()}
    chosen: dict[str, tuple[CompileRequest, list[nn.Module]]] = {}
    for block in blocks:
        path = path_of[id(block)]
        around = [(root, request) for root, request in asked if _is_inside(path, root)]
        if around:
            _, request = max(around, key=lambda pair: len(pair[0]))
            chosen.setdefault(repr(request), (request, []))[1].append(block)
    return list(chosen.values())


def unwrapped(block: nn.Module) -> nn.Module:
    """Returns the module that `torch.compile` was given, where the block is what that returned."""
    inner = getattr(block, "_orig_mod", None)
    return unwrapped(inner) if isinstance(inner, nn.Module) else block


def _is_inside(path: str, root: str) -> bool:
    """Says whether the block at `path` is the module at `root`, is inside it, or only wraps it."""
    return root == "" or f"{path}.".startswith(f"{root}.") or root == f"{path}._orig_mod"

"""Keeps the expensive results of a forward for the runs that repeat it.

Decides which operations are worth keeping the result of. Must not know blocks, or why a forward is run again.

[Note: why not PyTorch's own]
`torch.utils.checkpoint.create_selective_checkpoint_contexts` gives every kept result back once. A zero-bubble schedule
runs backward twice through one graph, for inputs and for weights, and so does `retain_graph=True`; each recomputes.
It also refuses a result that an in-place operation changed, such as a product before an in-place activation: here it is
computed again. Otherwise the same. Source: torch/utils/checkpoint.py, `_CachingTorchDispatchMode`.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

_aten = torch.ops.aten
_PRODUCTS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.convolution.default,
}
_ATTENTION = {
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_fused_attention_overrideable.default,
}
"""Results that cost more to compute than to store are kept: these, and products.

Source: torchtitan, `torchtitan/distributed/activation_checkpoint.py` (selective checkpointing by operation).
"""

KEPT = _PRODUCTS | _ATTENTION


class KeptResults:
    """Results of one run, by operation and in order."""

    def __init__(self) -> None:
        self._results: dict[Any, list[_Result]] = defaultdict(list)

    def collecting(self) -> AbstractContextManager[Any]:
        """Returns what notes results during the first run."""
        return _Collecting(self._results)

    def giving_back(self) -> AbstractContextManager[Any]:
        """Returns what gives them back during a later run, which has to ask for them in the same order."""
        return _GivingBack(self._results)


class _Result:
    """The result of an operation, and whether it was changed in place since."""

    def __init__(self, value: Any) -> None:
        self._value = tree_map_only(Tensor, _alias, value)
        self._versions = [leaf._version for leaf in tree_leaves(self._value) if isinstance(leaf, Tensor)]

    @property
    def unchanged(self) -> bool:
        """Whether no in-place operation has written to it."""
        return self._versions == [leaf._version for leaf in tree_leaves(self._value) if isinstance(leaf, Tensor)]

    def again(self) -> Any:
        """Returns it, without any history."""
        return tree_map_only(Tensor, _alias, self._value)


class _Collecting(TorchDispatchMode):
    def __init__(self, results: dict[Any, list[_Result]]) -> None:
        super().__init__()
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = func(*args, **(kwargs or {}))
        if _is_kept(func, args, kwargs or {}):
            self._results[func].append(_Result(value))
        return value


class _GivingBack(TorchDispatchMode):
    def __init__(self, results: dict[Any, list[_Result]]) -> None:
        super().__init__()
        self._coming = {func: iter(found) for func, found in results.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_kept(func, args, kwargs or {}):
            found = next(self._coming.get(func, iter(())), None)
            if found is not None and found.unchanged:
                return found.again()
        return func(*args, **(kwargs or {}))


def _is_kept(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Says whether the result is kept. Results of draws never are: later draws of the second run would differ."""
    return func in _PRODUCTS or (func in _ATTENTION and _dropout_of(func, args, kwargs) == 0.0)


def _dropout_of(func: Any, args: Any, kwargs: dict[str, Any]) -> float:
    if "dropout_p" in kwargs:
        return kwargs["dropout_p"]
    place = [argument.name for argument in func._schema.arguments].index("dropout_p")
    return args[place] if place < len(args) else 0.0


def _alias(tensor: Tensor) -> Tensor:
    """Returns the same memory and version counter in a tensor of its own, without the other's history."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()

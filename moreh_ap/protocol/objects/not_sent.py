"""Placeholders in a worker for objects that stay in the script: unpicklable ones, and parameters of other modules.

A model may keep a module that it has not registered, whose parameters no worker trains. A forward may still call it
with the model's own parameters put in their places, as functional calls do (`torch.func.functional_call`, losses of
TorchRL whose value networks are stacked). Decides what a worker has in place of each. Must not know how it is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moreh_ap.errors import UnsupportedError

_ASKS = {"size", "dim", "ndimension", "numel", "nelement", "stride", "__hash__", "__len__", "__repr__", "__deepcopy__"}
_GETTERS_OF_TENSORS = {"T", "mT", "H", "mH", "real", "imag"}


def refuse_use_of(kind: str, why: str) -> UnsupportedError:
    """Returns the error of a forward that uses what stays in the script.

    Args:
        kind: What it is, as a phrase.
        why: Why it stays there.
    """
    return UnsupportedError(
        f"forward uses {kind}, which is in the script's process alone: {why}.",
        allowed="What can be pickled (no open files, no locks), and modules in nn.ModuleList or nn.ModuleDict.",
        fix="call the model, then use it in the script",
    )


class NotSent:
    """A worker's placeholder for an object that stays in the script; using it raises an error that says so.

    Args:
        kind: What it is, as a phrase.
        why: Why it stays there.
    """

    def __init__(self, kind: str, why: str = "it cannot be pickled") -> None:
        self._kind, self._why = kind, why

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise refuse_use_of(self._kind, self._why)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Python asks whether there is one
            raise AttributeError(name)
        return NotSent(self._kind, self._why)  # objects keep methods of a lock: calling one is the error

    __call__ = __enter__ = __exit__ = __iter__ = __next__ = __len__ = __getitem__ = _refuse


@dataclass(frozen=True)
class OtherStub:
    """Such a parameter inside a pickled skeleton: its shape and dtype, and the class of its module."""

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def parameter(self) -> Tensor:
        """Returns the parameter of a worker."""
        made = torch.empty(self.shape, dtype=self.dtype, device="meta").as_subclass(OtherParameter)
        with torch._C.DisableTorchFunctionSubclass():
            made.requires_grad_()
        made._is_param = True  # type: ignore[attr-defined]
        made.kind = self.kind
        return made


class OtherParameter(Tensor):
    """Has no values; computing with it is an error that says so. Attributes: `kind`, the class of its module."""

    kind = ""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        of_property = getattr(getattr(func, "__self__", None), "__name__", "")
        asks = of_property not in _GETTERS_OF_TENSORS if name in ("__get__", "__set__") else name in _ASKS
        if asks or name.startswith("is_"):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        own = (*args, *(kwargs or {}).values())
        kind = next((one.kind for one in own if isinstance(one, OtherParameter)), "module")
        raise refuse_use_of(f"a {kind}", "it has trainable parameters that are none of the model's")

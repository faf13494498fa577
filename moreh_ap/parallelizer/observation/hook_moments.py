"""What hooks of the script find on a model in the middle of a forward: attributes that it has set, its buffers.

Decides what of it is other than after the forward, and from which hook on. Must not know who asks for it. Hooks run
once more where the script is, when the forward is through: see [Note: moments] in `hook_records.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from moreh_ap.protocol.hook_records import AT, FROM, HookMoments
from moreh_ap.protocol.module_attributes import Attributes, Marks, is_marked, mark_of


class _Entry(NamedTuple):
    """An attribute that was set before a hook ran: the hook's position, and its value and fingerprint there."""

    position: int
    name: str
    value: Any
    mark: Any


class _Read(NamedTuple):
    """A buffer that a hook has read: the hook's position, the buffer with its version, and a copy."""

    position: int
    name: str
    buffer: Tensor
    version: int
    copy: Tensor


class Moments(HookMoments):
    """What hooks find in one forward.

    Args:
        module: The model.
        attributes: Its attributes; None where it has none to look at.
        before: Their fingerprints before the forward.
        among: The attributes that are looked at; None for all.
    """

    def __init__(
        self, module: nn.Module, attributes: Attributes | None, before: Marks, among: Collection[str] | None
    ) -> None:
        self._module, self._attributes, self._marks, self._among = module, attributes, dict(before), among
        self._position, self._entries, self._reads = -1, list[_Entry](), dict[tuple[int, str], _Read]()
        self._names: dict[int, str] | None = None

    def before_hook(self) -> AbstractContextManager[Any]:
        self._position += 1
        for name, value in self._newly_changed():
            copied = value.copy() if type(value) in (list, dict, set) else value
            self._entries.append(_Entry(self._position, name, copied, self._marks[name]))
        return self._in_hook()

    @contextmanager
    def _in_hook(self) -> Iterator[None]:
        """While a hook runs; what it sets itself, it also sets where the script is."""
        with _ReadBuffers(self):
            yield
        list(self._newly_changed())

    def _newly_changed(self) -> Iterator[tuple[str, Any]]:
        if self._attributes is not None and (self._among is None or self._among):
            for name, value in self._attributes.changed(self._marks, self._among).items():
                self._marks[name] = mark_of(value)
                yield name, value

    def from_hook(self, changed: dict[str, Any]) -> dict[str, str]:
        """Returns of attributes that a forward has changed which hook was the first to find its value, as a suffix."""
        last = {entry.name: entry for entry in self._entries}
        return {
            name: f"{FROM}{last[name].position}"
            for name, value in changed.items()
            if name in last and is_marked(value, last[name].mark)
        }

    def at_hooks(self, changed: dict[str, Any]) -> dict[str, Any]:
        """Returns the values that were others after the forward, by name and hook.

        Args:
            changed: The attributes that the forward has changed, as they are after it.
        """
        last = {entry.name: entry for entry in self._entries}
        found = {
            f"{entry.name}{AT}{entry.position}": entry.value
            for entry in self._entries
            if entry is not last[entry.name]
            or not (entry.name in changed and is_marked(changed[entry.name], entry.mark))
            if not isinstance(entry.value, Tensor) or is_marked(entry.value, entry.mark)
        }
        found.update(
            {f"{read.name}{AT}{read.position}": read.copy for read in self._reads.values() if self._moves(read)}
        )
        return found

    def _moves(self, read: _Read) -> bool:
        """Whether a buffer may change after a hook has read it: batch normalisation gives it no new version."""
        path, _, last = read.name.rpartition(".")
        owner = self._module.get_submodule(path)
        return owner.training or owner._buffers.get(last) is not read.buffer or read.buffer._version != read.version

    def note_reads(self, tensors: Collection[Any]) -> None:
        """Copies buffers that a hook is about to read, or to change."""
        if self._names is None:
            self._names = {id(buffer): name for name, buffer in self._module.named_buffers()}
        for tensor in tensors:
            name = self._names.get(id(tensor))
            is_buffer = name is not None and tensor.grad_fn is None and not isinstance(tensor, nn.Parameter)
            if name is not None and is_buffer and (self._position, name) not in self._reads:
                with torch.no_grad():
                    read = _Read(self._position, name, tensor, tensor._version, tensor.detach().clone())
                self._reads[self._position, name] = read


class _ReadBuffers(TorchFunctionMode):
    """Notices, while a hook runs, which buffers it computes with."""

    def __init__(self, moments: Moments) -> None:
        super().__init__()
        self._moments = moments

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        with torch._C.DisableTorchFunctionSubclass():
            self._moments.note_reads(tensors)
        return func(*args, **(kwargs or {}))

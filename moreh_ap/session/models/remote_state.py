"""`optimizer.state` of an optimizer that steps on the workers.

Decides when the workers are asked. Must not know how steps are sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from moreh_ap.device.tensor import VirtualTensor, place
from moreh_ap.protocol.messages.optimizers import DescribeOptimizer
from moreh_ap.protocol.messages.tensors import StateRef
from moreh_ap.session.session import Session
from moreh_ap.session.state_tensors import OnWorkers, StateHolder, bring_here


class RemoteState(defaultdict[Tensor, Any]):
    """`optimizer.state` of a remote optimizer: filled from the workers when the script reads it.

    Args:
        session: The session of the workers.
        owner: The optimizer's name there.
        parameters: Those of all groups, in order.
        remote: The workers forget the optimizer with it.

    Attributes:
        is_known: Whether entries were read, or all of them taken out.

    Tensors of a parameter's shape are virtual tensors on the workers' state; others (step counts) are plain copies.
    What the script puts in, takes out or changes goes to the workers with the next step, which asks `has_changed`.
    """

    def __init__(self, session: Session, owner: str, parameters: list[Tensor], remote: object) -> None:
        super().__init__(dict)
        self._session, self._owner, self._parameters, self._remote = session, owner, parameters, remote
        self.is_known = False
        self._read: dict[Tensor, tuple[dict[str, Any], dict[str, Any]]] | None = None

    def forget(self) -> None:
        """Drops the entries that were read: a step was sent."""
        super().clear()
        self.is_known, self._read = False, None

    def has_changed(self) -> bool:
        """Returns whether the script has put in, taken out or replaced anything since the entries were read."""
        read = self._read
        if read is None or super().keys() != read.keys():
            return True
        return any(
            entries is not read[parameter][0] or not _are_marked(entries, read[parameter][1])
            for parameter, entries in super().items()
        )

    def clear(self) -> None:
        """Takes everything out; nothing is read for it."""
        super().clear()
        self.is_known, self._read = True, None

    def _look(self) -> None:
        if self.is_known:
            return
        self.is_known, self._read = True, {}
        session = self._session
        described: dict[int, dict[str, Any]] = {}
        in_order: list[tuple[StateRef, int]] = []
        for reply in session.outbox.submit(DescribeOptimizer(self._owner)).result():
            described.update(reply)
        for index, entries in sorted(described.items()):
            value = self._parameters[index]._cell.value  # type: ignore[attr-defined]
            placement = value.placement() if isinstance(value, OnWorkers) else None
            holder = StateHolder(session, placement, in_order, self._remote)
            state: dict[str, Any] = {}
            for key, entry in entries.items():
                if not isinstance(entry, Tensor):
                    state[key] = entry
                    continue
                ref = StateRef(self._owner, str(index), key)
                if entry.is_meta:
                    in_order.append((ref, entry.nbytes))
                if entry.is_meta:
                    state[key] = holder.handle(ref, entry)
                else:  # of another shape than the parameter; numbers of steps are on the CPU on every device
                    state[key] = place(entry) if entry.dim() > 0 else entry
            super().__setitem__(self._parameters[index], state)
            self._read[self._parameters[index]] = state, {key: _mark(value) for key, value in state.items()}

    def __getitem__(self, key: Tensor) -> Any:
        self._look()
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._look()
        return super().__contains__(key)

    def __iter__(self) -> Iterator[Tensor]:
        self._look()
        return super().__iter__()

    def __len__(self) -> int:
        self._look()
        return super().__len__()

    def __setitem__(self, key: Tensor, entries: Any) -> None:
        self._look()
        super().__setitem__(key, entries)

    def __delitem__(self, key: Tensor) -> None:
        self._look()
        super().__delitem__(key)

    def pop(self, *args: Any) -> Any:
        self._look()
        return super().pop(*args)

    def popitem(self) -> tuple[Tensor, Any]:
        self._look()
        return super().popitem()

    def setdefault(self, key: Tensor, default: Any = None) -> Any:
        self._look()
        return super().setdefault(key, default)

    def update(self, *args: Any, **kwargs: Any) -> None:
        self._look()
        super().update(*args, **kwargs)

    def get(self, key: Any, default: Any = None) -> Any:
        self._look()
        return super().get(key, default)

    def items(self) -> Any:
        self._look()
        return super().items()

    def keys(self) -> Any:
        self._look()
        return super().keys()

    def values(self) -> Any:
        self._look()
        return super().values()

    def read_here(self) -> defaultdict[Tensor, Any]:
        """Returns the state as an ordinary mapping, its tensors' values in the controller. Waits."""
        self._look()
        handles = [one for state in self.values() for one in state.values() if isinstance(one, VirtualTensor)]
        bring_here(self._session, [one for one in handles if isinstance(one._cell.value, OnWorkers)])
        return defaultdict(dict, self.items())

    def __reduce__(self) -> Any:
        """Pickles as an ordinary mapping."""
        return (defaultdict, (dict, dict(self.items())))


def is_entry(value: Any, owner: str, index: int, key: str) -> bool:
    """Returns whether an entry of the state of parameter `index` is the tensor that the workers have under its key."""
    held = value._cell.value if isinstance(value, VirtualTensor) else None
    return isinstance(held, OnWorkers) and held.ref == StateRef(owner, str(index), key)


def _mark(value: Any) -> Any:
    """Returns what shows later whether an entry is as it was: an object, and how often it was changed in place."""
    is_here = isinstance(value, Tensor) and not (isinstance(value, VirtualTensor) and value._cell.value.stays)
    return value, value._version if is_here else 0


def _are_marked(entries: dict[str, Any], marks: dict[str, Any]) -> bool:
    """Returns whether all entries are as they were when they were marked, and no other is among them."""
    return entries.keys() == marks.keys() and all(_is_marked(value, *marks[key]) for key, value in entries.items())


def _is_marked(value: Any, was: Any, version: int) -> bool:
    if value is not was:
        return not isinstance(value, Tensor) and type(value) is type(was) and bool(value == was)
    return version == _mark(value)[1]

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
        is_known: Whether there are entries that were read.

    Tensors of a parameter's shape are virtual tensors on the workers' state; others (step counts) are plain copies.
    """

    def __init__(self, session: Session, owner: str, parameters: list[Tensor], remote: object) -> None:
        super().__init__(dict)
        self._session, self._owner, self._parameters, self._remote = session, owner, parameters, remote
        self.is_known = False

    def forget(self) -> None:
        """Drops the entries that were read: a step was sent."""
        super().clear()
        self.is_known = False

    def _look(self) -> None:
        if self.is_known:
            return
        self.is_known = True
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

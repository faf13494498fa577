"""Watchers of the gradients of a call's outputs: backward hooks, `register_hook`, `retain_grad`, `torch.autograd.grad`.

Attached to a call by its first watcher; a backward through a call without watchers requests no output gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from torch import Tensor

from moreh_ap.device.tensor import place
from moreh_ap.protocol.messages.calls import ReadOutputGradient
from moreh_ap.protocol.messages.tensors import LeafReply
from moreh_ap.session.models.signatures import Structure
from moreh_ap.session.outbox import Outbox

Watcher = Callable[[dict[int, Tensor]], object]
"""Called with the gradients of a result's leaves, by index."""


class OutputWatchers:
    """The watchers of one call's outputs."""

    def __init__(self) -> None:
        self._entries: list[tuple[list[int], Watcher, bool]] = []

    def add(self, indices: list[int], watcher: Watcher, adds_up: bool = False) -> RemovableWatcher:
        """Calls `watcher` in every backward with the full gradients of some leaves of the result, by index.

        A watcher that `adds_up` accepts a gradient in several summands, one after the other.
        """
        entry = (indices, watcher, adds_up)
        self._entries.append(entry)
        return RemovableWatcher(lambda: self._entries.remove(entry) if entry in self._entries else None)

    def indices(self) -> tuple[int, ...]:
        """Returns the indices of the watched leaves."""
        return tuple(sorted({index for indices, *_ in self._entries for index in indices}))

    def want_full_gradients(self) -> bool:
        """Returns whether a watcher needs each gradient in full, not in summands."""
        return not all(adds_up for *_, adds_up in self._entries)

    def tell(self, gradients: dict[int, Tensor]) -> None:
        """Passes the gradients to all watchers, the latest first."""
        for watcher in self._latest_first():
            watcher(gradients)

    def _latest_first(self) -> Iterator[Watcher]:
        return (watcher for _, watcher, _ in reversed(self._entries))


class WatchedCall(Protocol):
    """A call whose outputs are watched."""

    structure: Structure | None

    def watch(self, indices: list[int], watcher: Watcher, adds_up: bool = False) -> RemovableWatcher: ...


def watch_output(
    call: WatchedCall, output: int, watcher: Callable[[Tensor], object], adds_up: bool = False
) -> RemovableWatcher | None:
    """Watches one tensor of a call's result, by its number among the tensors.

    Returns:
        None if the controller's autograd computes the gradient anyway: no other output of the call can depend on the
        tensor.
    """
    assert call.structure is not None
    tensors = [index for index, leaf in enumerate(call.structure.leaves) if leaf.kind != "const"]
    if sum(call.structure.leaves[index].differentiable for index in tensors) < 2:
        return None
    index = tensors[output]
    return call.watch([index], lambda found: watcher(found[index]) if index in found else None, adds_up)


def read_gradients(outbox: Outbox, call_id: int, indices: tuple[int, ...]) -> dict[int, Tensor]:
    """Returns the gradients of watched outputs that a backward left on the workers; waits for each."""
    gradients: dict[int, Tensor] = {}
    for index in indices:
        replies = [one for one in outbox.submit(ReadOutputGradient(call_id, index)).result() if one is not None]
        if replies:
            gradients[index] = place(LeafReply.join(replies))
    return gradients


class RemovableWatcher:
    """The handle of a hook: `remove` takes the hook off."""

    def __init__(self, remove: Callable[[], object]) -> None:
        self._remove = remove

    def remove(self) -> None:
        self._remove()

    def __enter__(self) -> RemovableWatcher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()

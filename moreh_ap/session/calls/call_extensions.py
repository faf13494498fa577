"""The one interface through which calls get what a plain call does without.

A plain call is sent, its outputs are promised, and its backward sends their gradients (`remote_call`). Whatever else a
script may use attaches here, and a script that does not use it never reaches it. Knows nothing of how that is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor


class Removable(Protocol):
    """What hooks return: `remove` ends them."""

    def remove(self) -> None: ...


class CallExtensions(Protocol):
    """What a session has beside plain calls; `call` is always a `remote_call.Call` whose forward was sent."""

    def finish(
        self, call: Any, leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any], hooks_done: int = 0
    ) -> Any:
        """The result of a call whose forward left more than outputs: reports of hooks, attributes, a cache.

        Args:
            call: The call.
            leaves: The leaves of its result.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
            hooks_done: How many hooks of the script have run already, see `script_hooks.RunsInScriptOnly`.

        Raises:
            RunsInScriptOnly: A hook of the script has raised in the workers and not here.
            Exception: What a hook raises here.
        """

    def watch_output(
        self, call: Any, output: int, watcher: Callable[[Tensor], object], adds_up: bool = False
    ) -> Removable | None:
        """Have every backward of a call give `watcher` the gradient of one tensor of its result.

        Args:
            call: The call.
            output: The number of the tensor among the tensors of the result.
            watcher: Called with the gradient, of the shape of the tensor.
            adds_up: Whether it may be given the gradient in several summands, one after the other.

        Returns:
            None where autograd in the controller knows the gradient by itself.
        """

    def differentiate(
        self, call: Any, gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        """The gradients of `inputs` of a call, with a graph, from the `gradients` of its outputs.

        Raises:
            UnsupportedError: Parameters would accumulate gradients with a graph, or the plan does not allow it.
        """

    def run_on_row_shards(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an ATen operation on outputs that stayed on the workers; NotImplemented to read them."""

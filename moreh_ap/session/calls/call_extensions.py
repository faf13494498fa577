"""The interface for everything that a call may use beyond a plain forward and backward.

A plain call is sent, its outputs are promises, and its backward sends their gradients (`remote_call`). All other
features attach here, and a script that does not use them never reaches this code. Must not know how they are
implemented.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor


class Removable(Protocol):
    """The handle of a hook: `remove` takes the hook off."""

    def remove(self) -> None: ...


class CallExtensions(Protocol):
    """The features of a session beyond plain calls; `call` is always a `RemoteCall` whose forward was sent."""

    def finish(
        self, call: Any, leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any], hooks_done: int = 0
    ) -> Any:
        """Returns the result of a call whose forward also reports hooks, attributes or a cache.

        Args:
            call: The call.
            leaves: The leaves of its result.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
            hooks_done: How many hooks of the script have run already, see `script_hooks.RunsInScriptOnly`.

        Raises:
            RunsInScriptOnly: A hook of the script raised on the workers and not in the controller.
            Exception: A hook raised it in the controller.
        """

    def watch_output(
        self, call: Any, output: int, watcher: Callable[[Tensor], object], adds_up: bool = False
    ) -> Removable | None:
        """Calls `watcher` with the gradient of one tensor of the result in every backward of the call.

        Args:
            call: The call.
            output: The number of the tensor among the tensors of the result.
            watcher: Called with the gradient, of the shape of the tensor.
            adds_up: Whether it accepts the gradient in several summands, one after the other.

        Returns:
            None if the controller's autograd computes that gradient anyway.
        """

    def differentiate(
        self, call: Any, gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        """Returns the gradients of `inputs` of a call, with a graph, from the `gradients` of its outputs.

        Raises:
            UnsupportedError: Parameters would accumulate gradients with a graph, or the plan does not allow it.
        """

    def run_on_row_shards(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns the result of an ATen operation on row shards; NotImplemented if they have to be read."""

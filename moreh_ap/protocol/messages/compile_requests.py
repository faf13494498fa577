"""What a script asks of `torch.compile`, as it is sent to workers."""

from __future__ import annotations

from typing import Any, NamedTuple


class CompileRequest(NamedTuple):
    """The options of `torch.compile` for one module; the defaults are PyTorch's.

    Attributes:
        backend: The name of the compiler; "" if the script gave a function, which only its own process can call.
        mode: The inductor's mode, None for its default.
        dynamic: Whether sizes are variables in compiled code; None: those that turn out to change.
        fullgraph: Whether a block that cannot be compiled is an error.
        options: The inductor's options, None for none.
    """

    backend: str = "inductor"
    mode: str | None = None
    dynamic: bool | None = None
    fullgraph: bool = False
    options: dict[str, Any] | None = None


CompileRequests = tuple[tuple[str, CompileRequest], ...]
"""The paths of the modules that a script has compiled, the outermost first, with their options."""

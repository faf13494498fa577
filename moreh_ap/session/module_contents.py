"""What modules contain, as it was at one moment: attributes, parameters, buffers, submodules, hooks, items of lists.

Decides what of a call is undone on the modules. Must not know who calls them, or why.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

_HELD = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, dict))
"""Parameters, buffers, submodules and hooks of every kind."""


class ModuleContents:
    """What modules contain now, to be put back. Values of tensors are not kept.

    Args:
        parts: The modules, without those in them.
    """

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        known = list(parts)
        held = [(part.__dict__, *(part.__dict__[name] for name in _HELD)) for part in known]
        self._contents = [(one, one.copy()) for of_part in held for one in of_part]
        kept = (one for part in known for one in vars(part).values() if type(one) in (list, dict, set))
        self._kept = [(one, one.copy()) for one in kept]

    def put_back(self) -> None:
        """Has the modules contain what they did."""
        for namespace, contents in self._contents:
            namespace.clear()
            namespace.update(contents)
        for one, items in self._kept:
            one.clear()
            (one.extend if isinstance(one, list) else one.update)(items)

"""The interface of extensions: features around the forward of a call that most calls do not use.

Hooks of the script, module attributes, state that forwards pass on, and parameters that travel between stages each
attach to the calls that use them. An ordinary call has no extensions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import nn

from moreh_ap.protocol.objects.returned_arguments import Place

Forward = Callable[[tuple[Any, ...], Mapping[str, Any]], Any]
"""Runs a module on positional and keyword arguments."""


class Findings:
    """The findings of extensions about a forward.

    Attributes:
        num_own: How many leaves of the result are the module's own, in front of what extensions added; None for all.
        attributes: How many leaves each attribute has that the forward set; they are the last ones of the result.
        attribute_kinds: The kinds of these leaves, where they are known. See [Note: kinds] in `call.py`.
        left_out: Names of attributes that it set and that are not among `attributes`.
        gathered: Names of attributes, lists and the like, to which it added.
        returned: Which argument it returned, if any; see `returned_arguments.py`.
    """

    num_own: int | None = None
    attributes: Mapping[str, int] = MappingProxyType({})
    attribute_kinds: tuple[str, ...] = ()
    left_out: Sequence[str] = ()
    gathered: Sequence[str] = ()
    returned: Place | None = None


class CallExtension:
    """Something around the forward of a call; the default changes nothing."""

    def around_forward(self, findings: Findings, module: nn.Module, forward: Forward) -> Forward:
        """Returns what runs in place of `forward`.

        Args:
            findings: Where to note what is found out.
            module: The model, or its copy on meta that a dry run uses.
            forward: The forward with the extensions before this one.
        """
        return forward

    def prepared(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Returns the arguments as the forward gets them, nested as they are; nothing watches yet what is computed."""
        return args, kwargs

    def knowing(self, attributes: Mapping[str, tuple[str, ...]]) -> CallExtension:
        """Returns the extension for split calls.

        Args:
            attributes: The attributes that the forward sets, and the kinds of their leaves. See `SplitVerdict`.
        """
        return self


def prepared(
    extensions: Sequence[CallExtension], module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Returns arguments as all extensions have them be before the forward."""
    for extension in extensions:
        args, kwargs = extension.prepared(module, args, kwargs)
    return args, kwargs


def extended(extensions: Sequence[CallExtension], findings: Findings, module: nn.Module, forward: Forward) -> Forward:
    """Returns `forward` with all extensions around it, the first one innermost."""
    for extension in extensions:
        forward = extension.around_forward(findings, module, forward)
    return forward

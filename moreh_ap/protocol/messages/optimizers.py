"""Optimizers on the workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moreh_ap.protocol.messages.tensors import StateRef, TensorData


@dataclass(frozen=True)
class BuildOptimizer:
    """Make an optimizer over parameters that live on the workers.

    Attributes:
        owner: Its name.
        pickled_class: Its class.
        groups: The parameters of each group.
        defaults: Settings of groups that have none of their own.
        attributes: Those that the class's `__init__` has set, which is not run then; None for optimizers of torch.
        needs_whole: Whether a step needs whole parameters; else each element is computed from those at its place.
        deals: Whether such a step takes long enough for workers to share the parameters among them.
    """

    owner: str
    pickled_class: bytes
    groups: tuple[tuple[StateRef, ...], ...]
    defaults: dict[str, Any]
    attributes: dict[str, Any] | None = None
    needs_whole: bool = False
    deals: bool = False


@dataclass(frozen=True)
class StepOptimizer:
    """One optimizer step.

    Attributes:
        owner: The optimizer.
        changes: Hyper-parameters that differ from the last step: ``{group: {name: value}}``.
        scaling: What `GradScaler` leaves to a fused step: ``grad_scale`` and ``found_inf``, where it has set them.
    """

    owner: str
    changes: dict[int, dict[str, Any]]
    scaling: Mapping[str, StateRef | TensorData] = field(default_factory=dict)


@dataclass(frozen=True)
class DescribeOptimizer:
    """Answer ``{parameter index: {key: entry}}``: a meta tensor for what is shaped like the parameter, or a value."""

    owner: str


@dataclass(frozen=True)
class LoadOptimizer:
    """Replace an optimizer's state.

    Attributes:
        owner: The optimizer.
        state: ``{parameter index: {key: TensorData, SavedTensor or a plain value}}``.
        kept: ``{parameter index: keys}`` of entries that stay as the workers have them.
    """

    owner: str
    state: dict[int, dict[str, Any]]
    kept: Mapping[int, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class ReleaseOptimizer:
    """Forget an optimizer with its state."""

    owner: str

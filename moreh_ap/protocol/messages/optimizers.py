"""Optimizers on the workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moreh_ap.protocol.messages.tensors import StateRef


@dataclass(frozen=True)
class BuildOptimizer:
    """Make an optimizer over parameters that live on the workers."""

    owner: str
    pickled_class: bytes
    groups: tuple[tuple[StateRef, ...], ...]
    defaults: dict[str, Any]


@dataclass(frozen=True)
class StepOptimizer:
    """One optimizer step. `changes` are hyper-parameters that differ from the last step: ``{group: {name: value}}``."""

    owner: str
    changes: dict[int, dict[str, Any]]


@dataclass(frozen=True)
class DescribeOptimizer:
    """Answer ``{parameter index: {key: entry}}``: a meta tensor for what is shaped like the parameter, or a value."""

    owner: str


@dataclass(frozen=True)
class LoadOptimizer:
    """Replace an optimizer's state: ``{parameter index: {key: TensorData, SavedTensor or a plain value}}``."""

    owner: str
    state: dict[int, dict[str, Any]]


@dataclass(frozen=True)
class ReleaseOptimizer:
    """Forget an optimizer with its state."""

    owner: str

"""Consensus of the workers on the outcome of a trial, after which all of them continue alike.

Decides which outcome counts. Must not know what was tried.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import get_world_size, is_initialized

from moreh_ap.parallelizer.call.call import Call
from moreh_ap.parallelizer.pipeline.stages import stages_of
from moreh_ap.parallelizer.trial.dry_run import Refused


class _Trial(Protocol):
    call: Call
    is_joined: bool


_T = TypeVar("_T", bound=_Trial)
_P = ParamSpec("_P")


def everywhere(ok: bool, call: Call) -> bool:
    """Says whether `ok` holds on every worker. A collective."""
    return worst(int(not ok), call) == 0


def worst(number: int, call: Call) -> int:
    """Returns the largest of the workers' numbers. A collective."""
    if not is_initialized() or get_world_size() == 1:
        return number
    largest = torch.tensor(number, device=call.device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest.item())


def all_workers_or_none(run: Callable[Concatenate[_T, _P], Any]) -> Callable[Concatenate[_T, _P], Any]:
    """Has a run in which workers exchange something raise on every worker if it raises on one. A collective there, and
    nothing elsewhere.

    What one stage raises for itself alone, about its own blocks, would leave the next one waiting for what it sends. So
    would what one worker finds of its own rows, where rows meet, leave those that compare theirs with it.
    """

    @functools.wraps(run)
    def together(trial: _T, *args: _P.args, **kwargs: _P.kwargs) -> Any:
        runs_in_stages = trial.call.grad and stages_of(trial.call.module) is not None
        if not runs_in_stages and not trial.is_joined:
            return run(trial, *args, **kwargs)
        done, failure = None, None
        try:
            done = run(trial, *args, **kwargs)
        except Exception as error:  # any error, of the script's forward or of what is put around it
            failure = error
        if everywhere(failure is None, trial.call):
            return done
        raise failure or Refused("another worker could not run a few rows")

    return together

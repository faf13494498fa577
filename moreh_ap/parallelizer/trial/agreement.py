"""Consensus of the workers on the outcome of a trial, after which all of them continue alike.

Decides which outcome counts. Must not know what was tried.
"""

from __future__ import annotations

import functools
import time
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
_R = TypeVar("_R")


ALONE_S = 20.0
"""How long a worker on which a forward has raised an error waits for others: they may wait for it inside of theirs."""

_POLL_S = 0.01


def everywhere(ok: bool, call: Call, error: Exception | None = None) -> bool:
    """Says whether `ok` holds on every worker. A collective.

    Args:
        ok: What this worker says.
        call: What was tried.
        error: An error that this worker may be alone with, if a host lacks what a forward reads; it is raised if others
            do not come. They never do where they wait for parts of sharded parameters that this worker has left.

    Raises:
        Exception: `error`.
    """
    return worst(int(not ok), call, error) == 0


def worst(number: int, call: Call, error: Exception | None = None) -> int:
    """Returns the largest of the workers' numbers. A collective; `error` as of `everywhere`."""
    if not is_initialized() or get_world_size() == 1:
        return number
    largest = torch.tensor(number, device=call.device)
    waiting = dist.all_reduce(largest, op=dist.ReduceOp.MAX, async_op=error is not None)
    if error is not None and waiting is not None:
        deadline_s = time.monotonic() + ALONE_S
        while not waiting.is_completed():
            if time.monotonic() > deadline_s:
                raise error
            time.sleep(_POLL_S)
        waiting.wait()
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
        return together_or_not(lambda: run(trial, *args, **kwargs), trial.call)

    return together


def together_or_not(run: Callable[[], _R], call: Call, *, is_alone: bool = False) -> _R:
    """Returns what `run` does. A collective, which raises on every worker if `run` raises on one.

    Args:
        run: What to run.
        call: What is being tried.
        is_alone: Whether others that do not come are not waited for, as in `everywhere`.

    Raises:
        Exception: What it has raised here.
        Refused: It has raised something elsewhere.
    """
    done: list[_R] = []
    failure: Exception | None = None
    try:
        done.append(run())
    except Exception as error:  # any error, of the script's forward or of what is put around it
        failure = error
    if everywhere(failure is None, call, failure if is_alone else None):
        return done[0]
    raise failure or Refused("another worker could not run a few rows")

"""Processes that run the jobs of the parallelizer's tests, so that a test costs no start of a process.

A job is a module-level function `job(rank, world, **arguments)`; it runs on `world` processes that share a gloo process
group, and its results come back in rank order. Each size has processes and a group of its own, started at the first job
that asks for it, and kept: a group has threads, and PyTorch remembers groups by their names.
"""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _serve(rank: int, world: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    while True:
        job, arguments = pipe.recv()
        try:
            pipe.send((True, job(rank, world, **arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


class _Processes:
    """The processes of one size."""

    def __init__(self, world: int, store: str) -> None:
        context = mp.get_context("spawn")
        self._world = world
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, store, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, job: Callable[..., Any], timeout_s: float, arguments: dict[str, Any]) -> list[tuple[bool, Any]]:
        deadline_s = time.monotonic() + timeout_s
        for pipe in self._pipes:
            pipe.send((job, arguments))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(0.0, deadline_s - time.monotonic())):
                raise TimeoutError(f"rank {rank} of {self._world} did not finish {job.__name__} within {timeout_s} s")
            answers.append(pipe.recv())
        return answers

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


class Team:
    """The processes of every size. `run` raises with the traceback of the first that failed."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._num_started = 0
        self._processes: dict[int, _Processes] = {}

    def run(self, world: int, job: Callable[..., Any], timeout_s: float = 120, **arguments: Any) -> list[Any]:
        """Returns what `job` returned on each of `world` processes.

        Raises:
            RuntimeError: The job raised on a process; the text is its traceback.
            TimeoutError: A process did not answer. The next job of this size gets new processes.
        """
        if world not in self._processes:
            self._num_started += 1
            self._processes[world] = _Processes(world, os.path.join(self._folder.name, str(self._num_started)))
        try:
            answers = self._processes[world].run(job, timeout_s, arguments)
        except BaseException:  # also Ctrl-C and pytest's own time limit: an answer would come to another job
            self._processes.pop(world).close()
            raise
        for rank, (ok, result) in enumerate(answers):
            if not ok:
                raise RuntimeError(f"rank {rank} of {world} failed in {job.__name__}:\n{result}")
        return [result for _, result in answers]

    def close(self) -> None:
        """Ends the processes."""
        for processes in self._processes.values():
            processes.close()
        self._folder.cleanup()

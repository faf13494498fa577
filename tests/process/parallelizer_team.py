"""Four processes that run the jobs of the parallelizer's tests, so that a test costs no start of a process.

A job is a module-level function `job(rank, world, **arguments)`; it runs on the first `world` processes, inside a fresh
gloo process group, and its results come back in rank order.
"""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SIZE = 4


def _serve(rank: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    while (message := pipe.recv()) is not None:
        job, world, store, arguments = message
        try:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
            try:
                pipe.send((True, job(rank, world, **arguments)))
            finally:
                dist.destroy_process_group()
        except BaseException:
            pipe.send((False, traceback.format_exc()))


class Team:
    """The processes. `run` raises with the traceback of the first that failed."""

    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._jobs = 0
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(SIZE):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, world: int, job: Callable[..., Any], timeout_s: float = 120, **arguments: Any) -> list[Any]:
        """Returns what `job` returned on each of `world` processes."""
        self._jobs += 1
        store = os.path.join(self._folder.name, str(self._jobs))
        for pipe in self._pipes[:world]:
            pipe.send((job, world, store, arguments))
        answers = []
        for rank, pipe in enumerate(self._pipes[:world]):
            if not pipe.poll(timeout_s):
                raise TimeoutError(f"rank {rank} of {world} did not finish {job.__name__} within {timeout_s} s")
            answers.append(pipe.recv())
        for rank, (ok, result) in enumerate(answers):
            if not ok:
                raise RuntimeError(f"rank {rank} of {world} failed in {job.__name__}:\n{result}")
        return [result for _, result in answers]

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()

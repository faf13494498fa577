#!/usr/bin/env python
"""Counts what a training step is made of: messages, bytes, waits, collectives, host synchronizations, Python calls.

    python scripts/step_counts.py                             # six kinds of steps, as rows of a table
    python scripts/step_counts.py replicate --functions 20    # one of them, and which functions are called most

`tests/process/step_counts.toml` has the table, and `tests/process/test_step_counts.py` compares it with what this
script counts; no command writes it.

[Note: two regimes]
Which commands share a message depends on when the workers are idle (see [Note: when commands leave]), and that depends
on the machine. So each kind of step is counted twice, and neither count depends on time. *Held*: the workers' processes
are stopped from the beginning of the step until the script waits, so they are busy whenever it looks. *Idle*: the
script's process goes on after each message only when all workers have answered it, so they are idle whenever it looks.

[Note: between two copies]
With recovery (`MOREH_RECOVERY=memory` or `auto`) workers copy what they hold after so many steps as the time of copies
and steps makes it. Copies are taken before the counted steps, and not in them, whatever these take.

[Note: first calls]
The first call of a kind is tried on a few rows before, which takes more forwards than later calls. So the calls of
modules in each worker are counted, in the first step, and in a first call with a padding mask where the model takes
one. They do not depend on time either.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import gc
import itertools
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import step_counts_worker
import torch
import torch.nn.functional as F
from call_counter import CallCounter
from controller_weight import ROWS, TOKENS, WARM_UP_STEPS, build, step_of
from step_counts_worker import OnWorker
from torch import nn

from moreh_ap import device
from moreh_ap.plan import Plan
from moreh_ap.protocol.messages.stream import ImportModules
from moreh_ap.protocol.messages.traces import BeginTrace, EndTrace
from moreh_ap.runtime.recovery.recovering_group import RecoveringWorkerGroup
from moreh_ap.runtime.recovery.snapshot_timing import SnapshotTiming
from moreh_ap.runtime.worker_group import WorkerGroup
from moreh_ap.session.controller_spans import ControllerSpans

LAYERS = 2
SIDE, NUM_CLASSES = 8, 4
STOPPED_S = 60.0
NEVER = 1 << 30
FIRST_ID = 1 << 20  # from here on numbers of things take as many bytes in a message, however many there were before
HELD, IDLE = "held", "idle"
FIRST = ("first", "first_padded")
"""What the first calls are counted as, in the order of a kind's steps. See [Note: first calls]."""

Step = Callable[[], object]
Functions = dict[str, dict[str, int]]
"""How often each function was called: by process, and by function."""


@dataclass(frozen=True)
class Counts:
    """What one step is made of; where a list stands, each worker's number, in rank order.

    Attributes:
        messages: Sent by the script's process to all workers.
        sent_bytes: In these messages.
        waits: How often the script waited for an answer.
        controller_calls: Python calls of the package in the script's process.
        worker_calls: The same in the workers.
        host_synchronizations: How often the package read the value of a tensor in a worker.
        collectives: Each worker's, by kind.
    """

    messages: int
    sent_bytes: int
    waits: int
    controller_calls: int
    worker_calls: list[int]
    host_synchronizations: list[int]
    collectives: dict[str, list[int]]


def llama() -> tuple[Step, ...]:
    """Returns a step of a Llama of two layers, and a forward with a padding mask."""
    model = build(LAYERS, with_cache=False).cuda()
    ids = torch.randint(0, 64, (ROWS, TOKENS)).cuda()
    mask = torch.ones_like(ids)
    mask[0, TOKENS // 2 :] = 0
    return step_of(model, "cuda"), lambda: model(input_ids=ids, attention_mask=mask, labels=ids).loss.item()


def cnn() -> tuple[Step, ...]:
    """Returns a step of two convolutions with batch normalisation."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, NUM_CLASSES),
    ).cuda()  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    pictures, labels = torch.randn(8, 3, SIDE, SIDE), torch.randint(0, NUM_CLASSES, (8,))

    def step() -> float:
        loss = F.cross_entropy(model(pictures.cuda()), labels.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return (step,)


def empty() -> tuple[Step, ...]:
    """Returns a step of a model without work."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = torch.randn(8, 1)

    def step() -> float:
        loss = model(inputs.cuda()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return (step,)


KINDS: dict[str, tuple[str, Callable[[], tuple[Step, ...]]]] = {
    "replicate": ("replicate=2", llama),
    "shard": ("shard=2", llama),
    "tensor": ("tensor=2", llama),
    "pipeline": ("pipeline=2,micro_batches=2", llama),
    "cnn": ("replicate=2", cnn),
    "empty": ("replicate=2", empty),
}
"""By name: the plan, and what makes a step, and what else is counted as a first call."""


class Regime:
    """Has workers always busy, or always idle, when the script looks. See [Note: two regimes].

    Args:
        workers: The workers.
        is_held: Whether they are held.

    Attributes:
        num_waits: How often the script waited for an answer that was not there when it looked.
    """

    def __init__(self, workers: WorkerGroup, *, is_held: bool) -> None:
        self._workers, self._is_held = workers, is_held
        self._pids = workers.pids
        self.num_waits = 0
        self._changed = threading.Condition()
        self._num_sent, self._num_completed = 0, 0

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Inside, a step runs; at the end all answers have been taken in."""
        workers = self._workers
        submit, complete = workers._submit, workers._complete

        def submitting(*args: Any) -> Any:
            reply = submit(*args)
            self._num_sent += 1
            if not self._is_held:
                concurrent.futures.wait([reply])
            return reply

        def completing(*args: Any) -> None:
            complete(*args)  # calls everything that waits for the answer
            with self._changed:
                self._num_completed += 1
                self._changed.notify_all()

        def waiting(reply: Any, timeout_s: float | None = None) -> None:
            is_there = reply.done()
            self.num_waits += not is_there
            if is_there or not self._is_held:
                WorkerGroup._wait(workers, reply, timeout_s)
                return
            self._go_on()
            WorkerGroup._wait(workers, reply, timeout_s)
            self._settle()
            self._stop()

        with (
            patch.object(workers, "_submit", submitting),
            patch.object(workers, "_complete", completing),
            patch.object(workers, "_wait", waiting),
        ):
            self._stop()
            try:
                yield
            finally:
                self._go_on()
            self._settle()

    def _settle(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._num_completed == self._num_sent)

    def _stop(self) -> None:
        if not self._is_held:
            return
        for pid in self._pids:
            os.kill(pid, signal.SIGSTOP)
        until_s = time.monotonic() + STOPPED_S
        while not all(_is_stopped(pid) for pid in self._pids):
            if time.monotonic() > until_s:
                raise TimeoutError(f"the workers have not stopped within {STOPPED_S} s")
            time.sleep(0.001)

    def _go_on(self) -> None:
        if self._is_held:
            for pid in self._pids:
                os.kill(pid, signal.SIGCONT)


def _is_stopped(pid: int) -> bool:
    threads = Path(f"/proc/{pid}/task").glob("*/stat")
    return all(thread.read_text().rpartition(")")[2].split()[0] == "T" for thread in threads)


class StepCounter:
    """Counts one kind of step.

    Args:
        step: The step; it has run a few times.
        calls: The profile function of this process's threads.
    """

    def __init__(self, step: Step, calls: CallCounter) -> None:
        self._step, self._calls = step, calls
        self._session = device.current().session

    def counts(self, regime: str) -> tuple[Counts, Functions]:
        """Returns the counts in a regime, and what was called."""
        is_held = regime == HELD
        messages, waits, sent_bytes, collectives, reads = self._traced(is_held)
        controller = self._controller_calls(is_held)
        nothing = self._on_workers("calls", lambda: None)  # the two messages around a step
        workers = self._on_workers("calls", lambda: self._run(is_held))
        workers = [
            collections.Counter(more) - collections.Counter(less) for more, less in zip(workers, nothing, strict=True)
        ]
        counts = Counts(messages, sent_bytes, waits, controller.total(), [one.total() for one in workers],
                        [sum(one.values()) for one in reads], collectives)  # fmt: skip
        functions = {"calls in the script's process": {" ".join(key): number for key, number in controller.items()}}
        for rank, (called, read) in enumerate(zip(workers, reads, strict=True)):
            functions |= {f"calls in worker {rank}": called, f"reads in worker {rank}": read}
        return counts, functions

    def _run(self, is_held: bool) -> int:
        """Runs a step; returns how often the script waited in it."""
        regime = Regime(self._session.workers, is_held=is_held)
        with regime.step():
            self._step()
        return regime.num_waits

    def _controller_calls(self, is_held: bool) -> collections.Counter[tuple[str, str]]:
        with no_finalizers(), Regime(self._session.workers, is_held=is_held).step():
            self._calls.begin()
            self._step()
            sys.setprofile(None)
        return self._calls.end()

    def _traced(self, is_held: bool) -> tuple[int, int, int, dict[str, list[int]], list[dict[str, int]]]:
        session = self._session
        session.outbox.flush()
        session.workers.submit(BeginTrace()).result()
        traced: list[Any] = []
        waits: list[int] = []  # not those of the trace, in which an answer may arrive just before the wait for it

        def run() -> None:
            spans = ControllerSpans(session)
            try:
                waits.append(self._run(is_held))
            finally:
                spans.stop()
            traced.extend(spans.recorder.spans)

        reads = self._on_workers("reads", run)
        workers = session.workers.submit(EndTrace()).result()
        sent = [span for span in traced if span.category == "message"]
        kinds = [
            collections.Counter(span.name for span in one.spans if span.category == "collective") for one in workers
        ]
        collectives = {kind: [one[kind] for one in kinds] for kind in sorted(set().union(*kinds))}
        return len(sent), waits[0], sum(span.details["bytes"] for span in sent), collectives, reads

    def first_call(self) -> tuple[dict[str, list[int]], Functions]:
        """Returns how often modules are called in the first step. See [Note: first calls]."""
        workers = self._on_workers("modules", self._step)
        functions = {f"modules called in worker {rank}": called for rank, called in enumerate(workers)}
        return {"module_calls": [sum(called.values()) for called in workers]}, functions

    def _on_workers(self, what: str, run: Callable[[], object]) -> list[dict[str, int]]:
        """Returns what the workers count while something runs."""
        session = self._session
        begin, end = (getattr(step_counts_worker, f"{edge}_{what}") for edge in ("begin", "end"))
        with tempfile.TemporaryDirectory() as folder:
            session.synchronize()
            session.workers.submit(ImportModules(OnWorker(begin))).result()
            run()
            session.workers.submit(ImportModules(OnWorker(end, folder))).result()
            return [json.loads((Path(folder) / f"{pid}.json").read_text()) for pid in session.workers.pids]


@contextlib.contextmanager
def no_finalizers() -> Iterator[None]:
    """Inside, no finalizer of earlier steps runs: what it releases is no part of this one."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def count(kind: str, calls: CallCounter) -> dict[str, tuple[dict[str, Any], Functions]]:
    """Returns the counts of a kind of step, of first calls and in both regimes; the accelerator is enabled by then."""
    plan, make = KINDS[kind]
    accelerator = device.current()
    accelerator.options = accelerator.session.options = replace(accelerator.options, plan=Plan.parse(plan))
    torch.manual_seed(0)
    steps = make()
    first = {name: StepCounter(step, calls).first_call() for name, step in zip(FIRST, steps)}
    for _ in range(WARM_UP_STEPS):
        steps[0]()
    _take_no_copies_from_now_on(accelerator.session.workers, steps[0])
    counter = StepCounter(steps[0], calls)
    for regime in (HELD, IDLE):
        counts, functions = counter.counts(regime)
        first[regime] = asdict(counts), functions
    return first


def _take_no_copies_from_now_on(workers: WorkerGroup, step: Step) -> None:
    """Has workers take the copy that has been asked for, and no other. See [Note: between two copies]."""
    if isinstance(workers, RecoveringWorkerGroup):
        timing = workers._log._timing
        for _ in range(3):  # one may wait for the next forward, and the timing begins anew when it is there
            timing.wanted = NEVER
            step()
        timing.wanted = NEVER


def main() -> int:
    """Runs the command line; returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", choices=[[], *KINDS], help="which steps (default: all)")
    parser.add_argument("--functions", type=int, default=0, help="how many of the most called functions to print")
    parser.add_argument("--json", type=Path, help="also write the counts to this file")
    args = parser.parse_args()
    calls = CallCounter()
    threading.setprofile(calls)  # for the threads that the accelerator starts
    SnapshotTiming.is_affordable = lambda timing: True  # type: ignore[method-assign]
    SnapshotTiming.most_s = lambda timing, is_early=False: float("inf")  # type: ignore[method-assign]
    torch.moreh.option.enable_advanced_parallelization(plan="replicate=2", mixed_precision=False)
    device.current().session.outbox._ids = itertools.count(FIRST_ID)
    empty()[0]()  # the first call of all measures the machine, if nothing is remembered of it
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for kind in args.kinds or KINDS:
        for regime, (counts, functions) in count(kind, calls).items():
            found.setdefault(kind, {})[regime] = counts
            print(kind, regime, counts, flush=True)
            for where, called in functions.items():
                for name, number in sorted(called.items(), key=lambda row: -row[1])[: args.functions]:
                    print(f"{number:6} {where}: {name}")
        gc.collect()
        device.current().session.synchronize()
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

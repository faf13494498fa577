"""Traces some training steps of a run into a file, in the script's process and in all workers.

Decides which steps, when processes begin and end to record, and which messages the user gets. Must not know what a span
is about, nor how the file is written.

[Note: steps]
A step ends with the optimizer's step: the next one begins there. Optimizers that step after another one in a script do
not count. One step before the first that is traced everything begins to record, so that what is slow the first time
(PyTorch's profiler) is not in the trace. At the beginning and at the end the script waits until the workers are done
with all that came before: what they do for a step lies within it, and nowhere else does a traced run wait more than
another.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import multiprocessing
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from moreh_ap.errors import OptionError
from moreh_ap.protocol.messages.traces import BeginTrace, EndTrace, WorkerTrace
from moreh_ap.session.controller_spans import ControllerSpans
from moreh_ap.session.session import Session
from moreh_ap.states import SessionState
from moreh_ap.tracing import chrome_trace
from moreh_ap.tracing.chrome_trace import ProcessTrace
from moreh_ap.tracing.spans import Span, now_ns, this_clock
from moreh_ap.version import __version__

_ANSWER_S = 10.0
"""How long an interrupted script waits at its end for what the workers have recorded."""


def is_traced_here() -> bool:
    """Returns whether this is the script's own process, and none that a script has started with `multiprocessing`."""
    return multiprocessing.parent_process() is None


class StepTracer:
    """Counts steps from its making on, and traces some.

    Args:
        session: The session whose workers are traced.
        file: Where the trace is written.
        first, last: The steps, counted from 1.
        done: Called when the file is written, with the first and the last step in it, and whether the script ended in
            the last one.
    """

    def __init__(
        self, session: Session, file: Path, first: int, last: int, done: Callable[[int, int, bool], object]
    ) -> None:
        self._session, self._file, self._first, self._last, self._done = session, file, first, last, done
        self._pid = os.getpid()
        self._num_steps = 0
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._spans: ControllerSpans | None = None
        self._ended_ns: list[int] = []  # when the steps ended, beginning with the one before the first
        self._hook = register_optimizer_step_post_hook(self._after_step)
        atexit.register(self._at_exit)
        self._arrive()

    def close(self) -> None:
        """Ends the trace, if it is not finished, and writes what has been recorded of its steps."""
        self._stop_counting()
        if self._spans is None:
            return
        if self._ended_ns:
            self._finish(is_early=True)
        else:
            self._spans.stop()

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        if self._optimizer is None:
            self._optimizer = weakref.ref(optimizer)
        if self._optimizer() is optimizer:
            self._num_steps += 1
            self._arrive()

    def _arrive(self) -> None:
        """Does what is to be done between the last step and the next one."""
        if self._num_steps >= max(self._first - 2, 0) and self._spans is None:
            self._begin()
        if self._num_steps in (self._first - 1, self._last):
            self._wait_for_workers()
        if self._num_steps >= self._first - 1:
            self._ended_ns.append(now_ns())
        if self._num_steps == self._last:
            self._finish(is_early=False)

    def _begin(self) -> None:
        # Exit handlers run last in, first out: workers that have been started meanwhile are there while this one runs.
        atexit.unregister(self._at_exit)
        atexit.register(self._at_exit)
        self._spans = ControllerSpans(self._session)
        # Hooks run first in, first out: a step ends when the span of the optimizer's step has ended.
        self._hook.remove()
        self._hook = register_optimizer_step_post_hook(self._after_step)
        self._session.outbox.flush()
        self._session.workers.submit(BeginTrace())

    def _wait_for_workers(self) -> None:
        """Waits until the workers are done; those of a script whose models are all in its own process have no work."""
        if self._has_models_on_workers():
            self._session.synchronize()

    def _has_models_on_workers(self) -> bool:
        return self._session.outbox.state.current is not SessionState.EMPTY

    def _finish(self, *, is_early: bool) -> None:
        """Writes the trace, and lets everything be as before."""
        self._stop_counting()
        spans, self._spans = self._spans, None
        assert spans is not None  # the first step to be traced has begun
        spans.stop()
        workers = self._from_workers(is_needed=not is_early and self._has_models_on_workers())
        if is_early:
            self._ended_ns.append(now_ns())
        steps = [
            Span(f"step {number}", "step", began_ns, ended_ns, chrome_trace.STEPS, {"step": number})
            for number, (began_ns, ended_ns) in enumerate(itertools.pairwise(self._ended_ns), self._first)
        ]
        traced = [
            ProcessTrace("controller", self._pid, this_clock(), [*steps, *spans.recorder.spans]),
            *(ProcessTrace(f"worker {rank}", one.pid, one.clock, one.spans) for rank, one in enumerate(workers)),
        ]
        window_ns = self._ended_ns[0], self._ended_ns[-1]
        traced = [chrome_trace.cut(one, traced[0].clock, *window_ns) for one in traced]
        last = self._first + len(steps) - 1
        chrome_trace.write(self._file, traced, self._notes(last))
        self._done(self._first, last, is_early)

    def _notes(self, last: int) -> dict[str, Any]:
        return {
            "steps": f"{self._first}-{last}",
            "workers": self._session.num_devices,
            "device": self._session.device_type,
            "moreh_ap": __version__,
            "torch": torch.__version__,
        }

    def _from_workers(self, *, is_needed: bool) -> list[WorkerTrace]:
        """Returns what the workers have recorded.

        Args:
            is_needed: Whether their errors are the script's; otherwise what they cannot answer in time is left out.
        """
        workers = self._session.workers
        if is_needed:
            return list(workers.submit(EndTrace()).result())
        for _ in range(2):  # the error of an earlier command is raised once
            with contextlib.suppress(Exception):  # of any class: the script has ended because of it, or goes on without
                return list(workers.submit(EndTrace()).result(_ANSWER_S))
        return []

    def _stop_counting(self) -> None:
        self._hook.remove()
        atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        """Writes the spans recorded until the script ended, or says why there are none."""
        if os.getpid() != self._pid:
            return  # a forked child has not trained
        if self._ended_ns:
            self.close()
        else:
            self._stop_counting()
            print(self._never_reached(), file=sys.stderr, flush=True)

    def _never_reached(self) -> OptionError:
        done = self._num_steps
        fact = f"MOREH_TRACE: the script ended before step {self._first} began; its optimizer has stepped {done} times"
        if done < 1:
            return OptionError(fact, "a script that trains", "optimizer.step()", chrome_trace.LINK)
        steps = f"MOREH_TRACE_STEPS={max(done - 2, 1)}-{done}"
        return OptionError(fact, f"steps from 1 to {done}", f"{steps} MOREH_TRACE={self._file}", chrome_trace.LINK)

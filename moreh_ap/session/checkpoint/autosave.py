"""Checkpoints that are saved by themselves: each so many minutes, and at SIGTERM.

Decides at which moment of a script its state is saved, what a failed save leads to, and what SIGTERM does. Must not
know what is in a checkpoint (`script_state`), nor how it is written.

[Note: between two steps]
At the end of an optimizer's step a script has not done with it: schedules step, losses are logged, the model may be
evaluated. All that is over when the model is called for training again. So what is due is saved at the first training
call after a step, and a script that goes on from there goes on with the next step. A script with several optimizers is
between two steps after that of the optimizer that was the last to begin.

[Note: SIGTERM]
Whoever sends SIGTERM to preempt a job sends SIGKILL after some 30 s. The handler waits for the end of the step under
way. A script that evaluates its model does not come to its next step soon: after `_PATIENCE_S` its state is saved where
it is, since weights do not change in an evaluation. If a step is still under way at `_LATEST_S`, the last checkpoint
is what stays. Then the script's own handler runs, or the process ends as it would have without ours. A handler of the
script's that replaced ours is found at the end of the next step. Nothing is saved in the middle of a function of ours.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from moreh_ap.local import interrupts, logger
from moreh_ap.patching import Patches
from moreh_ap.session.checkpoint import script_state
from moreh_ap.session.checkpoint.background_save import SaveInProgress
from moreh_ap.session.checkpoint.checkpoint_folder import last_saved
from moreh_ap.session.checkpoint.training_checkpoint import save_automatically
from moreh_ap.session.session import Session

_PATIENCE_S = 10.0
_LATEST_S = 20.0
_LOCK_WAITS_S = 5.0
"""At SIGTERM. At other times a save that another process is in the way of is left for later."""

_COMPLETED_WITHIN_S = 20.0
"""How long SIGTERM waits for a save in the background."""

_AGAIN_S = 60.0
"""After which a save that failed is tried again, if it is not due before."""


class AutoSave:
    """Saves from its making until `close`.

    Args:
        session: The session of the workers, in which it is registered.
        folder: The checkpoints' folder.
        every_s: Seconds from one checkpoint to the next.
    """

    def __init__(self, session: Session, folder: str, every_s: float) -> None:
        self._session, self._folder, self._every_s = session, folder, every_s
        self._num_steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._last: weakref.ref[Optimizer] | None = None  # of the optimizers, the last that began to step
        self._steps_before = 0  # of the checkpoint that was loaded
        self._begun_at: int | None = None  # the step of the last save that has begun, and has not failed
        self._saved_step: int | None = None
        self._saving: SaveInProgress | None = None
        self._is_between_steps = False
        self._streams: dict[str, Any] = {}  # after the last step
        self._restore: Callable[[], None] | None = None
        self._has_loaded = False
        self._due_s = time.monotonic() + every_s
        self._is_saving = False
        self._terminated: _Terminated | None = None
        self._theirs: Any = signal.SIG_DFL
        self._patches = Patches()
        self._replace_calls()
        self._patches.on_undo(register_optimizer_step_post_hook(self._after_step).remove)
        self._patches.on_undo(self._give_handler_back)
        session.autosave = self

    def close(self) -> None:
        """Stops saving."""
        self._session.autosave = None
        self._patches.undo()

    def resumed(self, steps: int, restore: Callable[[], None]) -> None:
        """Goes on from an automatic checkpoint.

        Args:
            steps: How many steps it has.
            restore: Restores the random streams; called before the next training call.
        """
        self._steps_before, self._restore, self._has_loaded = steps - self._steps_here(), restore, True

    # -- steps -----------------------------------------------------------------------------------------------------

    def _replace_calls(self) -> None:
        group = self._patches.group("Checkpoints are saved by themselves.")

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            """Calls a module; before the first training call of a step, does what is due between two steps."""
            if self._is_between_steps or self._restore is not None:
                self._before_call(module)
            return original_call(module, *args, **kwargs)

        original_call = group.replace(nn.Module, "__call__", call)

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        if optimizer not in self._num_steps:
            self._begins(optimizer)
        self._num_steps[optimizer] += 1
        last = None if self._last is None else self._last()
        self._is_between_steps = last is optimizer or last is None
        if self._is_between_steps:
            self._streams = script_state.random_streams()
        self._keep_handler()

    def _begins(self, optimizer: Optimizer) -> None:
        if not self._num_steps and not self._has_loaded:
            earlier = last_saved(self._folder)
            if earlier:
                logger.say(
                    f"{self._folder} has a checkpoint, {earlier}, which was not loaded: automatic checkpoints of this "
                    "run will replace it. See docs/checkpoints.md#autosave"
                )
        self._num_steps[optimizer], self._last = 0, weakref.ref(optimizer)

    def _steps_here(self) -> int:
        last = None if self._last is None else self._last()
        return 0 if last is None else self._num_steps[last]

    def _before_call(self, module: nn.Module) -> None:
        is_training = torch.is_grad_enabled() and next(module.parameters(), None) is not None
        terminated = self._terminated
        if is_training:
            is_due = self._is_between_steps and (terminated is not None or time.monotonic() >= self._due_s)
            self._is_between_steps = False
            restore, self._restore = self._restore, None
            if restore is not None:
                restore()
        else:
            is_due = terminated is not None and terminated.is_late and self._is_between_steps
        if is_due:
            if terminated is None:
                self._save_now(background=True)
            else:
                self._save_and_end(terminated)

    # -- saving ----------------------------------------------------------------------------------------------------

    def _save_now(self, *, background: bool) -> None:
        """Saves, or says why that was not possible: the training goes on in any case."""
        began_s, steps = time.monotonic(), self._steps_before + self._steps_here()
        if steps == self._begun_at:
            return
        self._is_saving = True
        try:
            state = script_state.find(list(self._num_steps), collects=self._saving is None)
            saving = self._saving = save_automatically(
                self._folder,
                model=state.model,
                optimizer=state.optimizer,
                extra={"steps": steps, **state.extra},
                random={
                    script_state.AFTER_STEP: self._streams,
                    script_state.BEFORE_CALL: script_state.random_streams(),
                },
                background=background,
                waits_s=0.0 if background else _LOCK_WAITS_S,
            )
        except Exception as error:  # of any class: a full disk, a folder in use, state of an unknown type
            self._failed(error)
            return
        finally:
            self._is_saving = False
        saving.was_told = True  # `done` reports an error, which is not raised at a save of the script
        self._begun_at, self._due_s = steps, time.monotonic() + self._every_s
        stopped_s = time.monotonic() - began_s

        def done(future: Any) -> None:
            error = future.exception()
            if error is None:
                self._saved_step = steps
                logger.say(f"Step {steps} is saved in {self._folder} (the training stopped for {stopped_s:.2f} s)")
            else:
                self._begun_at = None
                self._failed(error)

        saving.add_done_callback(done)

    def _failed(self, error: BaseException) -> None:
        first = (str(error).splitlines() or [""])[0]
        logger.say(f"nothing was saved into {self._folder}: {type(error).__name__}: {first}", logging.WARNING)
        self._due_s = time.monotonic() + min(self._every_s, _AGAIN_S)

    # -- SIGTERM: see [Note: SIGTERM] ------------------------------------------------------------------------------

    def _keep_handler(self) -> None:
        """Has our handler run before the script's, which the script may have set since the last step."""
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm or not interrupts.is_main_thread():
            return
        self._theirs = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def _give_handler_back(self) -> None:
        if interrupts.is_main_thread() and signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, self._theirs or signal.SIG_DFL)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        terminated = self._terminated
        if terminated is None:
            terminated = self._terminated = _Terminated()
        if self._is_saving:
            return
        is_saved = self._is_between_steps and self._begun_at == self._steps_before + self._steps_here()
        if terminated.is_through or is_saved or terminated.is_too_late:
            self._end(terminated, number, frame)
        elif terminated.is_late and self._is_between_steps and not interrupts.is_in_ours(frame):
            self._save_now(background=False)
            self._end(terminated, number, frame)

    def _save_and_end(self, terminated: _Terminated) -> None:
        self._save_now(background=False)
        terminated.is_through = True
        signal.raise_signal(signal.SIGTERM)  # Python runs the handler in the main thread

    def _end(self, terminated: _Terminated, number: int, frame: FrameType | None) -> None:
        """Does what SIGTERM would have done without us."""
        terminated.stop_waiting()
        self._terminated = None
        if self._saving is not None:
            with contextlib.suppress(TimeoutError, CancelledError):
                self._saving.exception(_COMPLETED_WITHIN_S)  # `done` reports it
        step = "no step" if self._saved_step is None else f"step {self._saved_step}"
        logger.say(f"SIGTERM: {step} is saved in {self._folder}")
        if callable(self._theirs):
            self._theirs(number, frame)
        elif self._theirs is not signal.SIG_IGN:
            sys.stdout.flush()
            sys.stderr.flush()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)


class _Terminated:
    """A SIGTERM that arrived: how long its handler has waited for the end of a step.

    Attributes:
        is_late: Whether a state in the middle of an evaluation is saved, too.
        is_too_late: Whether nothing is waited for.
        is_through: Whether what was to be saved is saved.
    """

    def __init__(self) -> None:
        self.is_late = self.is_too_late = self.is_through = False
        self._has_ended = threading.Event()
        threading.Thread(target=self._wait, name="moreh-sigterm", daemon=True).start()

    def stop_waiting(self) -> None:
        self._has_ended.set()

    def _wait(self) -> None:
        if not self._has_ended.wait(_PATIENCE_S):
            self.is_late = True
            os.kill(os.getpid(), signal.SIGTERM)
            if not self._has_ended.wait(_LATEST_S - _PATIENCE_S):
                self.is_too_late = True
                os.kill(os.getpid(), signal.SIGTERM)

"""Compares the first training steps with those of one device: `MOREH_CHECK=3 python train.py`.

One more worker gets the same commands and computes the whole batch alone, so the script runs once. Losses and gradients
are compared before each step, parameters and buffers after it.

[Note: equal gradients]
Gradients of several devices differ from those of one by rounding, and an optimizer such as Adam makes steps of equal
size along gradients that are nothing but rounding. So the reference worker continues from the gradients of the others,
once these were found to be its own but for rounding: the states after the step then agree to a few roundings, and each
step is judged by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from moreh_ap import log
from moreh_ap.device.tensor import VirtualTensor
from moreh_ap.errors import ExactnessError, UnsupportedError
from moreh_ap.local import logger
from moreh_ap.plan import Plan
from moreh_ap.protocol.messages.calls import DefineSignature, Forward, ForwardReply, ReadOutputs, ReleaseCalls
from moreh_ap.protocol.messages.models import BuildModel, ReadModuleSums, RecordModules
from moreh_ap.protocol.messages.tensors import LeafReply, OutputRef, StateRef
from moreh_ap.runtime.worker_group import WorkerGroup
from moreh_ap.session.calls.answer_check import answered
from moreh_ap.session.models.remote_optimizer import takes_steps_on_workers
from moreh_ap.session.outbox import Posted
from moreh_ap.session.session import Session
from moreh_ap.session.state_tensors import ModelState, OnWorkers
from moreh_ap.session.verification.reference_worker import ReferenceFailed, ReferenceWorker, Told
from moreh_ap.session.verification.step_differences import (
    SMALLEST_OUTPUT,
    SMALLEST_STATE,
    Difference,
    first_wrong_module,
    is_wrong_output,
    smallest_gradient,
    wrong_gradients,
    wrong_states,
)

_PORTION_BYTES = 64 << 20
"""Values are read in portions of this size, so that they do not fill the memory of the script's process."""

_MAX_OUTPUT_BYTES = 1 << 20
"""Larger outputs than this are compared by the gradients that they lead to."""


@dataclass(frozen=True)
class _Call:
    """A forward that was sent: the command, its place in the message, and both promises."""

    forward: Forward
    index: int
    posted: Posted
    told: Told


class FirstStepsCheck:
    """Compares until `num_steps` optimizer steps are through.

    Args:
        session: The session of the workers.
        start_reference: Starts the reference worker and returns at once.
        num_steps: Number of optimizer steps.
    """

    def __init__(self, session: Session, start_reference: Callable[[], WorkerGroup], num_steps: int) -> None:
        self._session, self._num_steps = session, num_steps
        self._reference = ReferenceWorker(start_reference)
        self._calls: list[_Call] = []
        self._released: set[int] = set()
        self._owners: dict[int, str] = {}  # the model of each signature
        self._plans: dict[str, Plan] = {}  # of each model
        self._num_done = 0
        self._is_reduced = False  # whether a call since the last step was computed in 16 bits
        self._is_over = False
        self._failure: ReferenceFailed | None = None
        self._worst = {"outputs": (0.0, ""), "gradients": (0.0, ""), "parameters": (0.0, "")}
        session.outbox.on_sent = self._tell
        # Steps that run on the workers call `before_change` and `after_step` themselves, the others by these hooks.
        self._hooks = (
            register_optimizer_step_pre_hook(lambda optimizer, *_: self._around(optimizer, self.before_change)),
            register_optimizer_step_post_hook(lambda optimizer, *_: self._around(optimizer, self.after_step)),
        )

    def close(self) -> None:
        """Ends the check, and the reference worker."""
        if self._is_over:
            return
        self._is_over = True
        self._session.check = self._session.outbox.on_sent = None
        for hook in self._hooks:
            hook.remove()
        self._reference.close()
        logger.say(log.first_steps_line(self._num_done, self._num_steps, self._worst))

    def _around(self, optimizer: Optimizer, check: Callable[[list[Tensor]], None]) -> None:
        if not takes_steps_on_workers(optimizer):
            check([parameter for group in optimizer.param_groups for parameter in group["params"]])

    def _tell(self, commands: Sequence[Any], posted: Sequence[Posted]) -> None:
        """Runs in whichever thread sends a message; a failure is raised at the script's next step."""
        if self._session.trial_plan is not None or self._failure is not None:
            return
        try:
            told = self._reference.tell(commands)
        except ReferenceFailed as failure:
            self._failure = failure
            return
        for index, command in enumerate(commands):
            if isinstance(command, BuildModel):
                self._plans[command.owner] = Plan.parse(command.plan)
            elif isinstance(command, DefineSignature):
                self._owners[command.signature] = command.owner
            elif isinstance(command, ReleaseCalls):
                self._released.update(command.call_ids)
            elif isinstance(command, Forward):
                self._calls.append(_Call(command, index, posted[index], told))

    # -- around a step ---------------------------------------------------------------------------------------------

    def before_change(self, parameters: Iterable[Tensor]) -> None:
        """Compares the calls since the last time, and gradients, before these are clipped or used. Waits.

        Raises:
            ExactnessError: They are not those of one device.
            UnsupportedError: One device could not compute what several did.
            Exception: A worker raised it in a call that the script has not waited for.
        """
        if self._session.trial_plan is not None:
            return
        self._session.outbox.flush()
        calls, self._calls = self._calls, []
        with self._ending_on_errors():
            answers = [call.posted.result() for call in calls]
            if self._failure is not None:
                raise self._failure
            for call, answer in zip(calls, answers):
                self._compare_outputs(call, answered(answer))
            self._is_reduced |= any(map(self._computes_in_16_bits, calls))
            self._compare_gradients(parameters)

    def after_step(self, parameters: Iterable[Tensor]) -> None:
        """Compares parameters and buffers. Waits.

        Raises:
            ExactnessError: They are not those of one device.
            UnsupportedError: One device could not compute what several did.
        """
        if self._session.trial_plan is not None:
            return
        self._session.outbox.flush()
        with self._ending_on_errors():
            if self._failure is not None:
                raise self._failure
            self._compare_states(parameters)
        self._is_reduced = False
        self._num_done += 1
        if self._num_done == self._num_steps:
            self.close()

    @contextmanager
    def _ending_on_errors(self) -> Iterator[None]:
        try:
            yield
        except ReferenceFailed as failure:
            self.close()
            raise UnsupportedError(
                f"MOREH_CHECK={self._num_steps}: one device failed at what {self._session.num_devices} devices did: "
                f"{failure}.",
                allowed="A model and a batch that one device has memory for.",
                fix="MOREH_CHECK=0 python train.py  # or a smaller batch for the check",
            ) from failure.__cause__
        except Exception:  # of any class: the script's own errors too, after which commands are skipped
            self.close()
            raise

    # -- comparisons -----------------------------------------------------------------------------------------------

    def _compare_outputs(self, call: _Call, ours: list[Any]) -> None:
        theirs = call.told.answer(call.index)
        if not all(isinstance(reply, ForwardReply) for reply in (*ours, theirs)):
            return  # the call was sent again with the attributes that it reads
        plan = self._plan_of(call)
        if theirs.streams is not None and (plan.tensor > 1 or plan.pipeline > 1):
            raise UnsupportedError(
                f"MOREH_CHECK={self._num_steps}: a forward draws random numbers, and under plan={str(plan)!r} they are "
                "others than on one device.",
                allowed="Forwards without dropout, or plans of replicate and shard.",
                fix="model.eval()  # for the check alone",
            )
        for index, leaf in enumerate(theirs.leaves):
            if leaf.dtype is None or not leaf.dtype.is_floating_point:
                continue
            values = self._outputs(call, index, [reply.leaves[index] for reply in ours], leaf)
            if values is None:
                continue
            got, expected = values
            difference = Difference.of("", got, expected)
            self._note("outputs", [difference], SMALLEST_OUTPUT)
            if is_wrong_output(difference, self._computes_in_16_bits(call)):
                numbers = f"{got.item():.7g} and {expected.item():.7g}" if got.numel() == 1 else str(difference)
                what = "a loss" if got.numel() == 1 else f"an output of shape {tuple(got.shape)}"
                raise self._wrong(f"{what} ({numbers})", self._begins_in(call, index))

    def _outputs(
        self, call: _Call, index: int, ours: list[LeafReply], theirs: LeafReply
    ) -> tuple[Tensor, Tensor] | None:
        """Returns an output on several devices and on one; None if it is large, or was freed."""
        if theirs.data is None or any(leaf.data is None for leaf in ours):
            meta = torch.empty(theirs.shape, dtype=theirs.dtype, device="meta")
            if call.forward.call_id in self._released or meta.nbytes > _MAX_OUTPUT_BYTES:
                return None
            read = ReadOutputs(call.forward.call_id, (index,))
            ours = answered([reply[0] for reply in self._session.outbox.submit(read).result()])
            theirs = self._reference.ask(read)[0]
        return LeafReply.join(ours), LeafReply.join([theirs])

    def _compare_gradients(self, parameters: Iterable[Tensor]) -> None:
        sizes = {}
        for holder, refs in _on_workers(parameters).items():
            present = holder.gradients.names()
            found = {ref: num_bytes for ref, num_bytes in refs.items() if ref.name in present}
            sizes.update({StateRef(ref.owner, "grad", ref.name): num_bytes for ref, num_bytes in found.items()})
        differences = list(self._differences(sizes, takes_over=True))
        self._note("gradients", differences, smallest_gradient(differences))
        wrong = [] if self._is_reduced else wrong_gradients(differences)
        if wrong:  # a backward begins at the end of the model
            raise self._wrong(f"the gradient of {wrong[-1].name} ({wrong[-1]})", wrong[-1].name.rpartition(".")[0])

    def _compare_states(self, parameters: Iterable[Tensor]) -> None:
        sizes = {}
        for holder, refs in _on_workers(parameters).items():
            sizes.update(refs)
            for buffer in () if self._is_reduced else holder.live_model().buffers.values():
                value = buffer._cell.value
                if isinstance(value, OnWorkers) and buffer.is_floating_point():
                    sizes[value.ref] = buffer.nbytes
        differences = list(self._differences(sizes, takes_over=False))
        self._note("parameters", differences, SMALLEST_STATE)
        wrong = wrong_states(differences)
        if wrong:
            raise self._wrong(f"after the step {wrong[0].name} ({wrong[0]})", wrong[0].name.rpartition(".")[0])

    def _differences(self, sizes: dict[StateRef, int], takes_over: bool) -> Iterator[Difference]:
        """Yields the differences of state tensors.

        Args:
            sizes: The tensors, and their bytes.
            takes_over: Whether the reference worker continues from the values of the others.
        """
        for portion in _portions(sizes):
            ours, theirs = self._session.read_state(portion), self._reference.read(portion)
            yield from (Difference.of(ref.name, *pair) for ref, *pair in zip(portion, ours, theirs))
            if takes_over:
                self._reference.write(dict(zip(portion, ours)))

    def _computes_in_16_bits(self, call: _Call) -> bool:
        """Returns whether a call is computed in bfloat16 or float16."""
        return call.forward.autocast_dtype is not None or self._plan_of(call).precision == "bf16"

    def _plan_of(self, call: _Call) -> Plan:
        return self._plans[self._owners[call.forward.signature]]

    def _note(self, kind: str, differences: Sequence[Difference], smallest: float) -> None:
        found = [(one.relative(smallest), one.name) for one in differences]
        self._worst[kind] = max([self._worst[kind], *found])

    def _begins_in(self, call: _Call, index: int) -> str | None:
        """Returns the submodule at which a forward begins to differ: it runs again, and outputs are summed up."""
        forward, owner = call.forward, self._owners[call.forward.signature]
        freed = {one.call_id for one in forward.tensors if isinstance(one, OutputRef)} & self._released
        if freed:
            return None
        outbox = self._session.outbox
        outbox.on_sent = None
        again = replace(forward, call_id=outbox.new_id(), expected=None)
        commands = (
            RecordModules(owner),
            again,
            ReadOutputs(again.call_id, (index,)),  # some plans compute a call when it is read
            ReadModuleSums(owner),
        )
        ours = [outbox.submit(command) for command in commands][-1].result()
        theirs = [self._reference.ask(command) for command in commands][-1]
        return first_wrong_module(ours, theirs)

    def _wrong(self, what: str, module: str | None) -> ExactnessError:
        place = "" if module is None else f" The difference begins in the submodule {module!r}." if module else ""
        return ExactnessError(
            f"Step {self._num_done + 1}: {what} differs on {self._session.num_devices} devices and on one.{place}",
            allowed="Rounding: what one device computes, in another order.",
            fix="MOREH_NUM_DEVICES=1 python train.py  # until the reason is known; please report the model",
            link="docs/verify.md#first-steps",
        )


def _on_workers(parameters: Iterable[Tensor]) -> dict[ModelState, dict[StateRef, int]]:
    """Returns the names and bytes of the parameters that are on the workers, by their model and in their order."""
    found: dict[ModelState, dict[StateRef, int]] = {}
    for parameter in parameters:
        value = parameter._cell.value if isinstance(parameter, VirtualTensor) else None
        if isinstance(value, OnWorkers) and isinstance(value.owner, ModelState):
            found.setdefault(value.owner, {})[value.ref] = parameter.nbytes
    return found


def _portions(sizes: dict[StateRef, int]) -> Iterator[tuple[StateRef, ...]]:
    """Yields the tensors in portions that fit into memory."""
    portion: list[StateRef] = []
    num_bytes = 0
    for ref, size in sizes.items():
        if portion and num_bytes + size > _PORTION_BYTES:
            yield tuple(portion)
            portion, num_bytes = [], 0
        portion.append(ref)
        num_bytes += size
    if portion:
        yield tuple(portion)

"""Chooses the plan by a rule: keep the whole model on a device if it fits, else split it as little as possible.

Decides which plans are candidates, in which order they are preferred, and what is said when none fits. Pure: numbers
and options in, a choice out. Must not know devices, processes, torch or the engine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moreh_ap.errors import PlanError
from moreh_ap.plan import Plan
from moreh_ap.planner import report
from moreh_ap.planner.memory import MemoryEstimate, ModelProfile, estimate_memory

if TYPE_CHECKING:
    from moreh_ap.option import Options

_MOST_DEVICES_SUGGESTED = 4096


@dataclass(frozen=True)
class Candidate:
    """One plan that was looked at.

    Attributes:
        plan: The plan.
        memory: What its fullest device would hold.
        fits: Whether that is within what a plan may fill.
    """

    plan: Plan
    memory: MemoryEstimate
    fits: bool

    @property
    def bytes(self) -> float:
        """Bytes that the fullest device would hold."""
        return self.memory.total_bytes


@dataclass(frozen=True)
class Choice:
    """The chosen plan with everything that led to it.

    Attributes:
        plan: The chosen plan.
        reason: One sentence with the numbers that decided.
        candidates: All plans looked at, preferred ones first.
        usable_bytes: What a plan may fill on the smallest device.
        lines: The log lines of the search, in the platform's order.
    """

    plan: Plan
    reason: str
    candidates: tuple[Candidate, ...]
    usable_bytes: float
    lines: tuple[str, ...]


def choose_plan(
    profile: ModelProfile,
    num_devices: int,
    device_memory_bytes: float,
    global_batch: int,
    options: Options,
    *,
    native_bf16: bool = False,
) -> Choice:
    """Returns the first candidate that fits, or the plan that the options force.

    Candidates are ordered by shard group, smallest first, and within it by micro-batches, fewest first: replicating
    everything talks least, and splitting the batch in time costs less than splitting the model. Candidates that
    recompute activations come last, and only where recomputation is left open and nothing fits without.

    Args:
        profile: The model.
        num_devices: Devices of the accelerator.
        device_memory_bytes: Memory of the smallest device.
        global_batch: Rows of the batch that the script passes.
        options: The user's settings.
        native_bf16: Whether the devices compute bfloat16 in hardware.

    Raises:
        PlanError: A forced plan does not match the devices, the options leave no candidate, or none fits.
    """
    if num_devices < 1 or global_batch < 1 or device_memory_bytes <= 0:
        raise PlanError(
            f"nothing to plan: {num_devices} devices of {device_memory_bytes:.0f} bytes, {global_batch} rows",
            "at least one device with memory and one row",
        )
    usable_bytes = device_memory_bytes * options.memory_usage_correction_ratio / 100
    started_s = time.perf_counter()
    if options.plan is None:
        precision = "bf16" if options.mixed_precision and native_bf16 else "fp32"
        plans = list(enumerate_plans(num_devices, global_batch, options, precision))
    else:
        plans = [_check_devices(options.plan, num_devices)]
    estimated_s = time.perf_counter()
    candidates = tuple(_weigh(profile, plan, global_batch, usable_bytes) for plan in plans)
    may_recompute = options.plan is None and options.activation_recomputation == "auto"
    if may_recompute and not any(candidate.fits for candidate in candidates):
        recomputing = (replace(plan, recompute="full") for plan in plans)
        candidates += tuple(_weigh(profile, plan, global_batch, usable_bytes) for plan in recomputing)
    fitting = [candidate for candidate in candidates if candidate.fits]
    if options.plan is not None:
        chosen = candidates[0]
        reason = f"plan={str(chosen.plan)!r} was asked for"
        if not chosen.fits:
            reason += "; by our estimate it does not fit"
    elif fitting:
        chosen = fitting[0]
        reason = _name_shape(chosen.plan)
    else:
        raise _nothing_fits(profile, candidates, usable_bytes, global_batch, options)
    reason += f": {_gib(chosen.bytes)} of {_gib(usable_bytes)} GiB a device may be filled with"
    if profile.activation_bytes_per_row == 0.0:
        reason += ", activations not counted"
    finished_s = time.perf_counter()
    lines = report.search_lines(
        num_candidates=len(candidates),
        num_possible=max(len(fitting), 1),
        prepare_s=estimated_s - started_s,
        select_s=finished_s - estimated_s,
        plan=chosen.plan,
        global_batch=global_batch,
    )
    return Choice(chosen.plan, reason, candidates, usable_bytes, tuple(lines))


def enumerate_plans(num_devices: int, global_batch: int, options: Options, precision: str) -> Iterator[Plan]:
    """Yields every plan that the options allow on `num_devices` devices, preferred ones first.

    Activations are recomputed where the options demand it, and otherwise not.
    """
    recompute = "full" if options.activation_recomputation is True else "none"
    for shard in range(1, num_devices + 1):
        if num_devices % shard or (shard > 1 and options.distribute_parameter is False):
            continue
        if shard == 1 and num_devices > 1 and options.distribute_parameter is True:
            continue
        for micro_batches in _micro_batch_counts(num_devices, global_batch, options):
            yield Plan(
                num_devices // shard, shard, micro_batches=micro_batches, recompute=recompute, precision=precision
            )


def _weigh(profile: ModelProfile, plan: Plan, global_batch: int, usable_bytes: float) -> Candidate:
    memory = estimate_memory(profile, plan, global_batch)
    return Candidate(plan, memory, memory.total_bytes <= usable_bytes)


def _micro_batch_counts(num_devices: int, global_batch: int, options: Options) -> Iterator[int]:
    """Yields the user's number, or 1, 2, 4 ... up to the rows that a device has."""
    if options.num_micro_batches != "auto":
        yield options.num_micro_batches
        return
    count = 1
    while count == 1 or count * num_devices <= global_batch:
        yield count
        count *= 2


def _check_devices(plan: Plan, num_devices: int) -> Plan:
    if plan.num_devices != num_devices:
        raise PlanError(
            f"plan={str(plan)!r} needs {plan.num_devices} devices, the accelerator has {num_devices}",
            f"replicate x shard x tensor x pipeline = {num_devices}",
            f'torch.moreh.option.enable_advanced_parallelization(plan="replicate={num_devices}")',
        )
    return plan


def _name_shape(plan: Plan) -> str:
    """Returns why a plan of the rule's own was chosen."""
    if plan.recompute == "full":
        return _name_shape(replace(plan, recompute="none")) + ", activations are recomputed"
    if plan.num_devices == 1:
        return "one device holds the model"
    if plan.shard == 1:
        return f"every one of {plan.replicate} devices holds the whole model"
    if plan.replicate == 1:
        return f"the model is split over all {plan.shard} devices"
    return f"{plan.replicate} groups of {plan.shard} devices hold the model each, split over the group"


def _nothing_fits(
    profile: ModelProfile, candidates: tuple[Candidate, ...], usable_bytes: float, global_batch: int, options: Options
) -> PlanError:
    """Returns the error that names bytes needed and available, and something that would fit."""
    least = min(candidates, key=lambda candidate: candidate.bytes)
    remedies = []
    if options.distribute_parameter is False:
        remedies.append("distribute_parameter='auto' (it is False)")
    if options.activation_recomputation is False and profile.recomputed_bytes_per_row:
        remedies.append("activation_recomputation='auto' (it is False)")
    if options.num_micro_batches != "auto":
        remedies.append(f"num_micro_batches='auto' (it is {options.num_micro_batches})")
    rows = _largest_batch(profile, least.plan, usable_bytes, global_batch)
    if rows:
        remedies.append(f"a batch of {rows} rows (it has {global_batch})")
    devices = _fewest_devices(profile, least.plan, usable_bytes, global_batch)
    if devices:
        remedies.append(f"{devices} devices (there are {least.plan.num_devices})")
    return PlanError(
        f"out of memory: the leanest plan {str(least.plan)!r} needs {_gib(least.bytes)} GiB on a device, "
        f"{_gib(usable_bytes)} GiB are available to it",
        " or ".join(remedies) or "a smaller model",
        f"torch.moreh.option.enable_advanced_parallelization(devices={devices})" if devices else "",
    )


def _largest_batch(profile: ModelProfile, plan: Plan, usable_bytes: float, global_batch: int) -> int:
    """Returns the largest batch below `global_batch` that fits, 0 if not even one row does."""
    low, high = 0, global_batch - 1
    while low < high:
        middle = (low + high + 1) // 2
        fits = estimate_memory(profile, plan, middle).total_bytes <= usable_bytes
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def _fewest_devices(profile: ModelProfile, plan: Plan, usable_bytes: float, global_batch: int) -> int:
    """Returns the smallest number of devices, doubled from the present, that fits fully sharded; 0 if none."""
    devices = plan.num_devices * 2
    while devices <= _MOST_DEVICES_SUGGESTED:
        candidate = Plan(
            1, devices, micro_batches=plan.micro_batches, recompute=plan.recompute, precision=plan.precision
        )
        if estimate_memory(profile, candidate, global_batch).total_bytes <= usable_bytes:
            return devices
        devices *= 2
    return 0


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f}"

"""What each device of a pipeline does and when: the order of forwards and backwards, and their beginnings and ends.

Decides the order, which is that of PyTorch's schedules, and plays it with the time that each stage takes. Must not know
devices or bytes; the cost model has its own closed formula, and this picture is how to check it.

[Note: order]
Device `d` of `p` begins with (v - 1) r + k (p - 1 - d) forwards, `v` the stages of a device and `r` the micro-batches
of a round; `k` is 2 with several stages, 1 otherwise and for zero bubble. Then comes a backward after every forward,
then the backwards that are left. GPipe begins with all forwards. Zero bubble splits backwards: the gradients of inputs
(`I`) are on the critical path, those of weights (`W`) follow as soon as they do not hold up others. Source:
torch/distributed/pipelining/schedules.py, `_get_1f1b_rank_ops` and `_get_warmup_ops`; a test compares them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from moreh_ap.plan import Plan
from moreh_ap.planner.cost.step_time import StepEstimate
from moreh_ap.planner.profiles.model_profile import ModelProfile

__all__ = ["Action", "Bar", "order_of", "simulate", "stage_seconds"]


@dataclass(frozen=True)
class Action:
    """One thing that a device does.

    Attributes:
        kind: "F" forward, "B" backward, or its parts "I" for inputs and "W" for weights.
        stage: Of which stage.
        micro_batch: Of which micro-batch.
    """

    kind: str
    stage: int
    micro_batch: int


@dataclass(frozen=True)
class Bar:
    """An action with its place in time, in seconds from the beginning of the step."""

    device: int
    action: Action
    start_s: float
    end_s: float


def order_of(plan: Plan) -> list[list[Action]]:
    """Returns what each device of the pipeline does, in order. See [Note: order].

    Example:
        >>> ["".join(f"{one.kind}{one.micro_batch} " for one in device) for device in order_of(Plan(pipeline=2))]
        ['F0 F1 B0 B1 ', 'F0 B0 F1 B1 ']
    """
    return [_order_of_device(plan, device) for device in range(plan.pipeline)]


def _order_of_device(plan: Plan, device: int) -> list[Action]:
    stages, count = plan.stages_per_device, plan.micro_batches
    splits = plan.schedule == "zero_bubble"
    total = stages * count
    round_size = count // max(1, count // plan.pipeline)
    hops = (2 if plan.schedule == "interleaved" else 1) * (plan.pipeline - 1 - device)
    first = total if plan.schedule == "gpipe" else min((stages - 1) * round_size + hops, total)
    actions: list[Action] = []
    used: Counter[tuple[str, int]] = Counter()

    def add(kind: str, step: int) -> None:
        local = (step // round_size) % stages
        stage = (local if kind == "F" else stages - 1 - local) * plan.pipeline + device
        actions.append(Action(kind, stage, used[kind, stage]))
        used[kind, stage] += 1

    weights = 0
    for step in range(first + total):
        if step < total:
            add("F", step)
        if step >= first:
            add("I" if splits else "B", step - first)
            if splits and step - first >= device:
                add("W", weights)
                weights += 1
    while splits and weights < total:
        add("W", weights)
        weights += 1
    return actions


def stage_seconds(profile: ModelProfile, plan: Plan, step: StepEstimate) -> list[tuple[float, float]]:
    """Returns forward and backward of one micro-batch on every stage; the slowest device takes the estimate's seconds.

    Recomputation, the tensor axis and waiting for the host are in them, by the share of forward and backward.
    """
    block = profile.block.product_flops_per_token + profile.block.attention_flops_per_row / profile.sequence_length
    weights = [len(blocks) * block for blocks in plan.stage_ranges(profile.num_blocks)]
    weights[0] += profile.first.product_flops_per_token
    weights[-1] += profile.last.product_flops_per_token
    if not any(weights):
        weights = [1.0] * plan.num_stages
    slowest = max(sum(weights[device :: plan.pipeline]) for device in range(plan.pipeline))
    both_s = (step.host_s + step.tensor_s) / plan.micro_batches
    forward_s = step.forward_s / plan.micro_batches + both_s / 3
    backward_s = (step.backward_s + step.recompute_s) / plan.micro_batches + both_s * 2 / 3
    return [(forward_s * weight / slowest, backward_s * weight / slowest) for weight in weights]


def simulate(plan: Plan, seconds: list[tuple[float, float]]) -> list[Bar]:
    """Returns when each action begins and ends if messages take no time.

    Args:
        plan: The plan.
        seconds: Forward and backward of one micro-batch on every stage.
    """
    orders, last = order_of(plan), plan.num_stages - 1
    ended: dict[Action, float] = {}
    free_s, place = [0.0] * plan.pipeline, [0] * plan.pipeline
    bars: list[Bar] = []
    while len(bars) < sum(map(len, orders)):
        before = len(bars)
        for device, actions in enumerate(orders):
            while place[device] < len(actions):
                action = actions[place[device]]
                needed = _needs(action, last, splits=plan.schedule == "zero_bubble")
                if any(one not in ended for one in needed):
                    break
                start_s = max([free_s[device], *(ended[one] for one in needed)])
                forward_s, backward_s = seconds[action.stage]
                end_s = start_s + {"F": forward_s, "B": backward_s}.get(action.kind, backward_s / 2)
                ended[action] = free_s[device] = end_s
                bars.append(Bar(device, action, start_s, end_s))
                place[device] += 1
        if len(bars) == before:
            raise AssertionError(f"the order of {plan} waits for itself")
    return bars


def _needs(action: Action, last: int, splits: bool) -> list[Action]:
    """Returns the actions, of any device, that have to end before this one begins."""
    stage, micro_batch = action.stage, action.micro_batch
    if action.kind == "F":
        return [Action("F", stage - 1, micro_batch)] if stage else []
    if action.kind == "W":
        return [Action("I", stage, micro_batch)]
    kind = "I" if splits else "B"
    return [Action(kind, stage + 1, micro_batch)] if stage < last else [Action("F", stage, micro_batch)]

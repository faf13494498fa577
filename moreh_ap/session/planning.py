"""Asks the planner for a plan and says in the log what was chosen."""

from __future__ import annotations

from torch import nn

from moreh_ap.plan import Plan
from moreh_ap.planner import report
from moreh_ap.planner.memory import ModelProfile
from moreh_ap.planner.rule import choose_plan
from moreh_ap.session.session import Session


def choose_plan_for(session: Session, root: nn.Module, rows: int | None) -> Plan:
    """The plan for a model that is called with a global batch of `rows`; logged, and written to the `.dump` files.

    Raises:
        PlanError: If no plan fits, or a forced plan does not match the devices.
    """
    devices, options = session.devices(), session.options
    batch = rows or 1
    choice = choose_plan(
        profile_of(root),
        len(devices),
        min(device.memory_bytes for device in devices),
        batch,
        options,
        native_bf16=all(device.native_bf16 for device in devices),
    )
    lines = [*choice.lines, report.plan_line(choice.plan, choice.reason)]
    if options.detailed_log == 1:
        lines += report.candidate_lines(choice)
    elif options.detailed_log == 2:
        report.write_autoconfig_log(choice)
    for line in lines:
        print(line, flush=True)
    report.write_selected_config(choice.plan, batch)
    return choice.plan


def profile_of(root: nn.Module) -> ModelProfile:
    """What the planner must know of a model; tied parameters count once."""
    tensors = [*root.parameters(), *root.buffers()]
    blocks = [block for group in root.modules() if isinstance(group, nn.ModuleList) for block in group]
    sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks]
    return ModelProfile(
        parameter_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        trainable_parameters=sum(p.numel() for p in root.parameters() if p.requires_grad),
        largest_block_parameters=max(sizes, default=0),
    )

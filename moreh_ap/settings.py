"""Every setting of the accelerator: its name, its default, the values it may have, and the variable that sets it.

Decides how arguments and environment variables become one frozen `Options`. Must not know what is done with them.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from moreh_ap.errors import OptionError, PlanError
from moreh_ap.hosts.host_list import SSH_VARIABLE as SSH_VARIABLE
from moreh_ap.hosts.host_list import file_of_hosts, parse_hosts
from moreh_ap.plan import Plan

ENABLE_VARIABLE = "MOREH_ENABLE_ADVANCED_PARALLELIZATION"
NUM_DEVICES_VARIABLE = "MOREH_NUM_DEVICES"
_PREFIX = "MOREH_ADVANCED_PARALLELIZATION_"
COMPILE_THREADS_VARIABLE = _PREFIX + "MAX_PARALLEL_COMPILE_THREADS"
DETAILED_LOG_VARIABLE = _PREFIX + "DETAILED_LOG"
MEMORY_RATIO_VARIABLE = _PREFIX + "MEMORY_USAGE_CORRECTION_RATIO"
HOSTS_VARIABLE = "MOREH_HOSTS"
PLAN_VARIABLE = "MOREH_PLAN"
STRICT_VARIABLE = "MOREH_STRICT"
CHECK_VARIABLE = "MOREH_CHECK"
RECOVERY_VARIABLE = "MOREH_RECOVERY"
ELASTIC_VARIABLE = "MOREH_ELASTIC"
TRACE_VARIABLE = "MOREH_TRACE"
TRACE_STEPS_VARIABLE = "MOREH_TRACE_STEPS"
REPORT_VARIABLE = "MOREH_REPORT"
AUTOSAVE_VARIABLE = "MOREH_AUTOSAVE"
AUTOSAVE_MINUTES_VARIABLE = "MOREH_AUTOSAVE_MINUTES"

_READ_ELSEWHERE = ("MOREH_LOG_LEVEL", "MOREH_KUBERNETES_JOB", "MOREH_KUBERNETES_NODES", "MOREH_KUBERNETES_START_S")
VARIABLES = frozenset(
    value for name, value in list(globals().items()) if name.endswith("_VARIABLE") and isinstance(value, str)
).union(_READ_ELSEWHERE)
"""All environment variables that are read, but for those of `MOREH_AP`, which users need not set."""

REPORT_FOLDER = "moreh_report"
"""Of ``report=True``."""

AUTOSAVE_MINUTES = 10.0

TRACED_STEPS = (13, 15)
"""Usual ones: earlier steps are compared with their prediction, or tried in another place."""

RECOVERY = ("off", "memory", "auto")

_CALL = "torch.moreh.option.enable_advanced_parallelization"
_LINK = "docs/ap/advanced-settings.md"


@dataclass(frozen=True)
class Options:
    """Every setting of one accelerator, checked. Two calls with equal options mean the same accelerator.

    Attributes:
        pipeline_parallel: Whether a pipeline may be used.
        num_stages: Largest total number of pipeline stages, also if a device has several.
        num_micro_batches: Exact number of micro-batches into which a device divides its batch slice.
        activation_recomputation: Whether every block recomputes its activations, or none does.
        distribute_parameter: Whether devices that share the batch shard parameters, gradients and optimizer state.
        mixed_precision: Whether plans may compute in bfloat16, on GPUs that have it natively.
        devices: Number of devices; None means all there are.
        asks_for_devices: Whether the script itself gives their number, and not a variable.
        trace_file: Where a trace of steps is written; empty: nowhere.
        trace_steps: The first and the last step in it, counted from 1.
        report_folder: Where a report of the run is written; empty: nowhere.
        autosave_folder: Where checkpoints are saved by themselves; empty: nowhere.
        autosave_minutes: Minutes from one of these checkpoints to the next.
        plan: The plan to use; None leaves it to the planner.
        autotune: Whether the planner's best plans are tried before one is kept.
        hosts: The hosts whose devices are used, as they were given; empty: this machine.
        max_parallel_compile_threads: Threads used while candidates are prepared.
        detailed_log: 0 normal, 1 more on the console, 2 into a file.
        memory_usage_correction_ratio: Per cent of a device's memory that a chosen plan may reserve.
        strict: Whether a training call that every device computes whole is an error.
        check_steps: Number of first steps that one more worker computes alone, to be compared.
        recovery: Whether other workers take over where one is lost: "off", "memory", or "auto" where that is cheap.
        elastic: Whether hosts that join during the run are used, and devices that were gone, with the state that
            recovery keeps.
        hosts_file: The file that names the hosts; empty: they were named in another way.
    """

    pipeline_parallel: bool = True
    num_stages: int | Literal["auto"] = "auto"
    num_micro_batches: int | Literal["auto"] = "auto"
    activation_recomputation: bool | Literal["auto"] = "auto"
    distribute_parameter: bool | Literal["auto"] = "auto"
    mixed_precision: bool = True
    devices: int | None = None
    plan: Plan | None = None
    autotune: bool = False
    max_parallel_compile_threads: int = 16
    detailed_log: int = 0
    memory_usage_correction_ratio: int = 80
    strict: bool = False
    check_steps: int = 0
    recovery: str = "auto"
    elastic: bool = False
    trace_file: str = ""
    trace_steps: tuple[int, int] = TRACED_STEPS
    report_folder: str = ""
    autosave_folder: str = ""
    autosave_minutes: float = AUTOSAVE_MINUTES
    hosts: tuple[str, ...] = field(default=(), repr=False)  # may have secrets
    hosts_file: str = ""
    asks_for_devices: bool = field(default=False, compare=False)

    @property
    def leaves_layout_open(self) -> bool:
        """Whether nothing says how a model is to be laid out, so that a small one need not be on the workers at all."""
        wishes = (
            self.plan,
            self.hosts,
            self.autotune,
            self.strict,
            self.check_steps > 0,
            not self.pipeline_parallel,
            self.activation_recomputation is True,
        )
        return not any(wishes) and self.num_stages == self.num_micro_batches == self.distribute_parameter == "auto"


def resolve_options(
    environment: Mapping[str, str],
    *,
    pipeline_parallel: bool = True,
    num_stages: int | Literal["auto"] = "auto",
    num_micro_batches: int | Literal["auto"] = "auto",
    activation_recomputation: bool | Literal["auto"] = "auto",
    distribute_parameter: bool | Literal["auto"] = "auto",
    mixed_precision: bool = True,
    devices: int | None = None,
    plan: Plan | None = None,
    autotune: bool = False,
    hosts: tuple[str, ...] = (),
    hosts_file: str = "",
    report_folder: str = "",
    recovery: str | None = None,
    elastic: bool | None = None,
    autosave_folder: str = "",
) -> Options:
    """Returns the options that checked arguments and the environment make together; an argument outranks a variable.

    Raises:
        OptionError: A variable has a wrong value, or the plan contradicts another argument.
        PlanError: The text of the variable is no plan.
    """
    asks_for_devices = devices is not None
    plan = _read_plan(environment) if plan is None else plan
    if plan is not None and devices is None:
        devices = plan.num_devices
    if devices is None:
        devices = _read_variable(environment, NUM_DEVICES_VARIABLE, 0, least=1) or None
    if not hosts and environment.get(HOSTS_VARIABLE, "").strip():
        hosts = parse_hosts(environment[HOSTS_VARIABLE], f"environment: {HOSTS_VARIABLE}")
        hosts_file = file_of_hosts(environment[HOSTS_VARIABLE])
    if elastic is None:
        elastic = bool(_read_variable(environment, ELASTIC_VARIABLE, 0, least=0, most=1))
    options = Options(
        pipeline_parallel=pipeline_parallel,
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        activation_recomputation=activation_recomputation,
        distribute_parameter=distribute_parameter,
        mixed_precision=mixed_precision,
        devices=devices,
        plan=plan,
        autotune=autotune,
        hosts=hosts,
        max_parallel_compile_threads=_read_variable(environment, COMPILE_THREADS_VARIABLE, 16, least=1),
        detailed_log=_read_variable(environment, DETAILED_LOG_VARIABLE, 0, least=0, most=2),
        memory_usage_correction_ratio=_read_variable(environment, MEMORY_RATIO_VARIABLE, 80, least=1, most=100),
        strict=bool(_read_variable(environment, STRICT_VARIABLE, 0, least=0, most=1)),
        check_steps=_read_variable(environment, CHECK_VARIABLE, 0, least=0),
        recovery=_read_recovery(environment) if recovery is None else recovery,
        elastic=elastic,
        hosts_file=hosts_file,
        trace_file=environment.get(TRACE_VARIABLE, "").strip(),
        trace_steps=_read_steps(environment),
        report_folder=report_folder or environment.get(REPORT_VARIABLE, "").strip(),
        autosave_folder=autosave_folder or environment.get(AUTOSAVE_VARIABLE, "").strip(),
        autosave_minutes=_read_minutes(environment),
        asks_for_devices=asks_for_devices,
    )
    if plan is not None:
        _check_plan(plan, options)
    if hosts:
        _check_hosts(options)
    if options.elastic and options.recovery == "off":
        fact = "elastic=True, but recovery is off: hosts that join get what recovery has kept"
        raise OptionError(fact, "recovery='memory' or 'auto'", f"{_CALL}(elastic=True, recovery='memory')", _LINK)
    return options


def unread_variables(environment: Mapping[str, str]) -> list[str]:
    """Returns a sentence for each variable whose name is nearly that of one of ours, in the order of their names."""
    found = []
    for name in sorted(environment):
        if name.startswith("MOREH_") and not name.startswith("MOREH_AP") and name not in VARIABLES:
            near = difflib.get_close_matches(name[6:], [known[6:] for known in sorted(VARIABLES)], 1)
            found += [f"The variable {name} is not read: the nearest name that is read is MOREH_{one}." for one in near]
    return found


def enabled_by_environment(environment: Mapping[str, str]) -> bool:
    """Returns whether the environment asks for what the one line does.

    Raises:
        OptionError: The variable is neither `0` nor `1`.
    """
    return bool(_read_variable(environment, ENABLE_VARIABLE, 0, least=0, most=1))


def _read_plan(environment: Mapping[str, str]) -> Plan | None:
    text = environment.get(PLAN_VARIABLE, "").strip()
    try:
        return Plan.parse(text) if text else None
    except PlanError as error:
        fact, fix = f"environment: {PLAN_VARIABLE}={text!r}: {error.fact}", f"export {PLAN_VARIABLE}=shard=2"
        raise PlanError(fact, error.allowed, fix) from None


def _check_hosts(options: Options) -> None:
    """Raises OptionError where another option does not go with the hosts."""
    num_hosts = len(options.hosts)
    if options.devices is not None and options.devices % num_hosts:
        each = max(1, options.devices // num_hosts)
        raise OptionError(
            f"devices={options.devices} on {num_hosts} hosts: every host has the same number of workers",
            f"a multiple of {num_hosts}",
            f"{_CALL}(hosts=..., devices={each * num_hosts})",
            _LINK,
        )


def _check_plan(plan: Plan, options: Options) -> None:
    """Raises OptionError where an argument next to `plan` says something else than the plan does."""
    if options.devices != plan.num_devices:
        sizes = {name: getattr(plan, name) for name in ("replicate", "shard", "tensor", "pipeline")}
        factors = " x ".join(str(size) for name, size in sizes.items() if size > 1 or name in ("replicate", "shard"))
        other = f"devices={options.devices}, but the plan has {factors} = {plan.num_devices} devices"
    elif not options.pipeline_parallel and plan.pipeline > 1:
        other = f"pipeline_parallel=False, but the plan has pipeline={plan.pipeline}"
    elif options.num_stages != "auto" and options.num_stages < plan.num_stages:
        other = f"num_stages={options.num_stages} at most, but the plan has {plan.num_stages}"
    elif options.num_micro_batches not in ("auto", plan.micro_batches):
        other = f"num_micro_batches={options.num_micro_batches}, but the plan has {plan.micro_batches}"
    elif options.activation_recomputation is True and plan.recompute == "none":
        other = "activation_recomputation=True, but the plan has recompute=none"
    elif options.activation_recomputation is False and plan.recompute != "none":
        other = f"activation_recomputation=False, but the plan has recompute={plan.recompute}"
    elif options.distribute_parameter is False and plan.shard > 1:
        other = f"distribute_parameter=False, but the plan shards parameters over {plan.shard} devices"
    elif options.distribute_parameter is True and plan.shard == 1 and plan.replicate > 1:
        other = f"distribute_parameter=True, but the plan has {plan.replicate} copies of every parameter and shard=1"
    elif not options.mixed_precision and plan.precision == "bf16":
        other = "mixed_precision=False, but the plan computes in bfloat16"
    elif options.autotune:
        other = "autotune=True, but there is one plan to choose from"
    else:
        return
    raise OptionError(
        f"plan={str(plan)!r}: {other}",
        "a plan alone, or arguments that agree with it",
        f'{_CALL}(plan="{plan}")',
        _LINK,
    )


def check_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _wrong_value(name, value, "True or False", "True")
    return value


def check_bool_or_auto(name: str, value: object) -> bool | Literal["auto"]:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value == "auto":
        return "auto"
    raise _wrong_value(name, value, "True, False or 'auto'", "'auto'")


def check_report(value: object) -> str:
    """Returns the folder of the report that `report=` asks for; empty: none is asked for."""
    if isinstance(value, bool):
        return REPORT_FOLDER if value else ""
    if isinstance(value, (str, os.PathLike)) and os.fspath(value):
        return str(os.fspath(value))
    raise _wrong_value("report", value, "True, False or the path of a folder", "True")


def check_autosave(value: object) -> str:
    """Returns the folder that `autosave=` names; empty: none is named."""
    if value is None:
        return ""
    if isinstance(value, (str, os.PathLike)) and os.fspath(value):
        return str(os.fspath(value))
    raise _wrong_value("autosave", value, "the path of a folder, or None", "'checkpoints/automatic'")


def check_count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _wrong_value(name, value, "an integer of at least 1", "2")
    return value


def check_count_or_auto(name: str, value: object) -> int | Literal["auto"]:
    if isinstance(value, str) and value == "auto":
        return "auto"
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _wrong_value(name, value, "an integer of at least 1, or 'auto'", "'auto'")
    return value


def _wrong_value(name: str, value: object, allowed: str, example: str) -> OptionError:
    return OptionError(f"{name}={value!r} ({type(value).__name__})", allowed, f"{_CALL}({name}={example})", _LINK)


def _read_variable(
    environment: Mapping[str, str], name: str, default: int, *, least: int, most: int | None = None
) -> int:
    """Returns the integer that the variable spells, or `default` where it is not set or empty."""
    text = environment.get(name, "").strip()
    if not text:
        return default
    number = int(text) if text.isascii() and text.isdigit() else None
    if number is None or number < least or (most is not None and number > most):
        allowed = f"an integer of at least {least}" if most is None else f"an integer from {least} to {most}"
        raise OptionError(f"environment: {name}={text!r}", allowed, f"export {name}={max(default, 1)}", _LINK)
    return number


def check_recovery(name: str, value: object) -> str:
    if not isinstance(value, str) or value not in RECOVERY:
        raise _wrong_value(name, value, "'off', 'memory' or 'auto'", "'auto'")
    return value


def _read_recovery(environment: Mapping[str, str]) -> str:
    """Returns what the variable says of recovery.

    Raises:
        OptionError: It says something else.
    """
    text = environment.get(RECOVERY_VARIABLE, "").strip() or "auto"
    if text not in RECOVERY:
        fact, allowed = f"environment: {RECOVERY_VARIABLE}={text!r}", "off, memory or auto"
        raise OptionError(fact, allowed, f"export {RECOVERY_VARIABLE}=memory", "docs/recovery.md")
    return text


def _read_minutes(environment: Mapping[str, str]) -> float:
    """Returns the minutes from one automatic checkpoint to the next.

    Raises:
        OptionError: The variable spells no positive number.
    """
    text = environment.get(AUTOSAVE_MINUTES_VARIABLE, "").strip()
    if not text:
        return AUTOSAVE_MINUTES
    try:
        minutes = float(text)
    except ValueError:
        minutes = math.nan
    if not 0 < minutes < math.inf:
        fact = f"environment: {AUTOSAVE_MINUTES_VARIABLE}={text!r}"
        raise OptionError(fact, "a number of minutes above 0", f"export {AUTOSAVE_MINUTES_VARIABLE}=10", _LINK)
    return minutes


def _read_steps(environment: Mapping[str, str]) -> tuple[int, int]:
    """Returns the first and the last step that the variable spells, as "13-15" or "13".

    Raises:
        OptionError: It spells none.
    """
    text = environment.get(TRACE_STEPS_VARIABLE, "").strip()
    if not text:
        return TRACED_STEPS
    numbers = [int(part) if part.isascii() and part.isdigit() else 0 for part in map(str.strip, text.split("-"))]
    first, last = numbers[0], numbers[-1]
    if len(numbers) > 2 or not 1 <= first <= last:
        raise OptionError(
            f"environment: {TRACE_STEPS_VARIABLE}={text!r}",
            "the first and the last step to be traced, counted from 1, or one step",
            f"export {TRACE_STEPS_VARIABLE}={TRACED_STEPS[0]}-{TRACED_STEPS[1]}",
            _LINK,
        )
    return first, last

"""The accelerator for the planner: catalogue figures for known devices, measured figures for others.

Decides the source of each figure, and measures once for each machine. Must not know models or plans. Saved
measurements are read by `device_rates`.

[Note: workers that share cores]
A CPU worker's rates are those of its processor while it has one. With more threads than cores each gets a part of
them, so every rate is divided by that. An exchange then takes what the processors have to do for it, since others
compute while one waits. If every worker has a core, it takes as long as the clock says, but no longer than the work of
all members one after another: any longer time was due to other programs.
"""

from __future__ import annotations

import contextlib
import logging
import platform
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from moreh_ap import log
from moreh_ap.errors import OptionError, PlanError
from moreh_ap.hosts.host_list import public_name
from moreh_ap.hosts.reachability import Speed
from moreh_ap.local import logger
from moreh_ap.local.cache_files import CacheFile
from moreh_ap.planner.cost.coefficients import COEFFICIENTS, Coefficients
from moreh_ap.planner.cost.hardware import Cluster, Device, Link, find_device, find_link
from moreh_ap.planner.cost.measured_collectives import MeasuredCollective
from moreh_ap.planner.cost.training_systems import MOREH_AP, MOREH_AP_ON_CPU, TrainingSystem
from moreh_ap.protocol.messages.devices import DeviceInfo, DeviceRates, ProbeDevice
from moreh_ap.runtime.recovery.other_devices import DevicesJoinedError
from moreh_ap.session.planning.device_rates import as_entry, rates_of, slowest
from moreh_ap.session.session import Session
from moreh_ap.settings import Options

FILE = CacheFile("machine.json")

STEP_S = 0.005
"""Seconds that this runtime adds to a step of any model. Source: docs/benchmarks.md, an empty model."""


HOST_S_PER_OPERATION = 6e-5
"""Seconds of the host for an operation of a block on a GPU worker, beyond starting it: FSDP2's hooks around each block,
and the torch function modes of a call. Source: GPT-2 124M (12 blocks of 26 operations, forward and backward) on an H200
of 26 November 2026, whose steps of 8 x 1,024 tokens took 66 ms with the GPU idle for 43 % of them."""

MOST_OFF = 2.0
"""Factor by which a measured rate of a known device may be off from its data sheet: further off, measuring failed, as
beside other programs on the device."""


@dataclass(frozen=True)
class Machine:
    """The planner's description of an accelerator.

    Attributes:
        cluster: Devices and links.
        system: The properties of this package's runtime on such devices.
        coefficients: Constants of the estimates on such devices.
        key: The name under which corrections for the machine are saved.
    """

    cluster: Cluster
    system: TrainingSystem
    coefficients: Coefficients
    key: str


def machine_of(session: Session) -> Machine:
    """Returns the accelerator of a session; measures it if this machine was not measured before.

    If devices differ, the smallest memory and the slowest rates count. Measuring takes some seconds and needs every
    worker.
    """
    (info, native), hosts = _weakest(session.devices()), session.hosts
    num_devices = len(session.devices())
    key = machine_key(info, num_devices, hosts)
    rates, is_new = rates_of(FILE.look_up(key)), False
    if rates is None:
        per_host = num_devices // len(hosts) if len(hosts) > 1 else 0
        answers: Sequence[DeviceRates] = session.outbox.submit(ProbeDevice(native, per_host)).result()
        rates, is_new = slowest(answers), True
        with contextlib.suppress(OSError):  # the folder cannot be written: the machine is measured again next time
            FILE.keep(key, as_entry(rates))
        if per_host:
            _say_of_hosts(list(map(public_name, hosts)), session.devices(), answers)
    machine = _described(info, native, num_devices, rates, key, session.options, len(hosts))
    if is_new and machine.cluster.num_nodes > 1:
        logger.say(log.measured_links_line(machine.cluster))
    return machine


def _say_of_hosts(hosts: Sequence[str], infos: Sequence[DeviceInfo], answers: Sequence[DeviceRates]) -> None:
    """Says which hosts have other devices than the rest, or slower ones, since the others wait for these."""
    per_host = len(infos) // len(hosts)
    names = [infos[index * per_host].name for index in range(len(hosts))]
    if len(set(names)) > 1:
        logger.say(log.other_devices_line(dict(zip(hosts, names))))
    rates = [slowest(answers[index * per_host :][:per_host]).products[0][3] for index in range(len(hosts))]
    slow = {host: rate / max(rates) for host, rate in zip(hosts, rates) if rate < _SLOW * max(rates)}
    if slow and len({one.machine for one in infos}) > 1:
        logger.say(log.slow_hosts_line(slow))


_SLOW = 0.8
"""Part of the fastest host's rate; a host below it is said to be slow."""


def machine_on(session: Session, num_devices: int, hosts: Sequence[str] = ()) -> Machine | None:
    """Returns the same accelerator with another number of devices, of which no worker needs to run.

    If so many were never measured, fewer devices have the rates of the present ones: an exchange among fewer members is
    predicted to take what the nearest measured one takes, and a CPU worker is predicted to have no more threads.

    Args:
        session: The session of the present workers.
        num_devices: How many devices.
        hosts: Those of the hosts that have them; none: all.

    Returns:
        None if so many were never measured and they are more than the present ones, or nothing is saved of those.
    """
    (info, native), present, before = _weakest(session.devices()), len(session.devices()), session.hosts
    known_as, hosts = machine_key(info, present, before), hosts or before
    if len(hosts) < len(before):
        info = replace(info, num_cores=info.num_cores * len(hosts) // len(before))
    there = replace(info, num_threads=max(1, info.num_cores // num_devices)) if info.num_threads else info
    key = machine_key(there, num_devices, hosts)
    rates = rates_of(FILE.look_up(key))
    if rates is not None:
        return _described(there, native, num_devices, rates, key, session.options, len(hosts))
    rates = rates_of(FILE.look_up(known_as))
    if rates is None or num_devices > present:
        return None
    return _described(info, native, num_devices, rates, key, session.options, len(hosts))


def machine_with(session: Session, num_devices: int, joined: DevicesJoinedError, known_as: str) -> Machine | None:
    """Returns the same accelerator once hosts have joined, of which no worker needs to run.

    If these hosts were never measured together, they have the rates of the present ones, and links between them are
    those of the present ones or the one that was measured as others joined, whichever is slower.

    Args:
        session: The session of the present workers.
        num_devices: Devices of all hosts.
        joined: The hosts, and that link.
        known_as: The key of the present machine.

    Returns:
        None if nothing is saved of the present machine.
    """
    (info, native), present = _weakest(session.devices()), len(session.devices())
    info = replace(info, num_cores=info.num_cores * num_devices // present)  # each brings its own
    key, num_hosts = machine_key(info, num_devices, joined.hosts), len(joined.hosts)
    known = rates_of(FILE.look_up(key))
    rates = known or rates_of(FILE.look_up(known_as))
    if rates is None:
        return None
    machine = _described(info, native, num_devices, rates, key, session.options, num_hosts)
    return machine if known or joined.between is None else _over(machine, joined.between)


def _over(machine: Machine, link: Speed) -> Machine:
    """Returns a machine whose hosts exchange over a link, if that is slower than what they exchange over."""
    inter = machine.cluster.inter
    if link.bytes_per_s >= inter.bytes_per_s:
        return machine
    slower = Link("measured", link.bytes_per_s, max(inter.latency_s, link.round_trip_s / 2))
    return replace(machine, cluster=replace(machine.cluster, inter=slower))


def _weakest(infos: Sequence[DeviceInfo]) -> tuple[DeviceInfo, bool]:
    """Returns the device with the least free memory, and whether all devices compute bfloat16 in hardware."""
    info = min((_without_others(rank, one) for rank, one in enumerate(infos)), key=lambda one: one.memory_bytes)
    info = replace(info, num_cores=info.num_cores * len({one.machine for one in infos}))
    return info, all(one.native_bf16 for one in infos)


def machine_key(info: DeviceInfo, num_devices: int, hosts: Sequence[str] = ()) -> str:
    """Returns the name under which what was found out of so many devices of these hosts is saved."""
    place = ", ".join(map(public_name, hosts)) or platform.node()
    threads = f" with {info.num_threads} threads" if info.num_threads else ""
    return f"{place}, {num_devices} x {info.name}{threads}, torch {torch.__version__}"


def _described(
    info: DeviceInfo, native: bool, num_devices: int, rates: DeviceRates, key: str, options: Options, num_hosts: int
) -> Machine:
    # CPU workers stand in for accelerators, and are compared with one process on the CPU, which computes in float32.
    computes_bf16 = native and info.name != "CPU"
    precision = "bf16" if computes_bf16 and options.mixed_precision else "fp32"
    if options.plan is not None:
        precision = options.plan.precision
    per_host = num_devices // max(1, num_hosts)
    return machine_from(replace(info, native_bf16=computes_bf16), precision, num_devices, rates, key, per_host)


_LEAST_FREE = 0.1
"""Of a device's memory; less is not worth planning for."""


def _without_others(rank: int, info: DeviceInfo) -> DeviceInfo:
    """Returns a device with the memory that other processes leave of it.

    Raises:
        PlanError: They leave next to nothing.
    """
    free_bytes = info.memory_bytes - info.held_by_others_bytes
    if free_bytes < _LEAST_FREE * info.memory_bytes:
        raise PlanError(
            f"other processes hold {info.held_by_others_bytes / 2**30:.1f} of the {info.memory_bytes / 2**30:.1f} GiB "
            f"of worker {rank}'s {info.name}",
            "GPUs with free memory, which CUDA_VISIBLE_DEVICES can name",
            "nvidia-smi  # shows the processes on each GPU",
            "docs/gpu.md#errors",
        )
    return replace(info, memory_bytes=free_bytes)


def machine_from(
    info: DeviceInfo, precision: str, num_devices: int, rates: DeviceRates, key: str = "", per_host: int = 0
) -> Machine:
    """Returns a machine of equal devices with these rates.

    Args:
        info: One of the devices.
        precision: The precision of the plans.
        num_devices: The number of devices.
        rates: The measured rates of each device.
        key: The name under which corrections for the machine are saved.
        per_host: Devices of each host; 0: all are on one.
    """
    coefficients = replace(COEFFICIENTS, step_s=STEP_S)
    if not any(found == precision for found, *_ in rates.products):
        precision = "fp32"  # bfloat16 is measured only where the hardware computes it
    sustained, half_tokens, half_width = _product_constants(rates, precision)
    system = replace(MOREH_AP, host_s_per_kernel=MOREH_AP.host_s_per_kernel + HOST_S_PER_OPERATION)
    sharing = 1.0
    if info.name == "CPU":
        sharing = max(1.0, num_devices * info.num_threads / max(1, info.num_cores))
        system = replace(MOREH_AP_ON_CPU, host_s_per_kernel=rates.start_s * sharing)
        coefficients = replace(coefficients, kernel_s=0.0)
    try:
        device = find_device(info.name)
        found = sustained / device.peak_flops(precision)
        if not device.sustained / MOST_OFF <= found <= device.sustained * MOST_OFF:
            logger.say(log.unlikely_rate_line(device, precision, found), logging.DEBUG)
            found = device.sustained
        device = replace(device, memory_bytes=float(info.memory_bytes), sustained=min(1.0, found))
    except OptionError:
        coefficients = replace(coefficients, half_tokens=half_tokens, half_width=half_width, memory=1.0)
        fp32_flops = _product_constants(rates, "fp32")[0]
        device = Device(
            name=info.name,
            memory_bytes=float(info.memory_bytes),
            bf16_flops=(sustained if precision == "bf16" else fp32_flops) / sharing,
            fp32_flops=fp32_flops / sharing,
            memory_bytes_per_s=rates.update_bytes_per_s / sharing,
            sustained=1.0,
            native_bf16=info.native_bf16,
            elementwise=tuple(
                sorted((float(moved), rate / sharing) for found, moved, rate in rates.elementwise if found == precision)
            ),
            sharing=sharing,
        )
    inside = per_host or num_devices
    link = _link(rates.exchanges, inside, info.name == "CPU", sharing) if inside > 1 else find_link("PCIe4")
    between = _link(rates.between, num_devices, False, sharing) if rates.between else link
    return Machine(Cluster(device, num_devices, inside, link, between), system, coefficients, key)


def _product_constants(rates: DeviceRates, precision: str) -> tuple[float, float, float]:
    """Returns the rate of infinitely large products, and the tokens and the width at which half of it is reached.

    Solves `rate = endless x m / (m + m0) x w / (w + w0)` for three measured products (`planner/cost/compute_time.py`).
    """
    found = {(tokens, width): rate for name, tokens, width, rate in rates.products if name == precision}
    long, short = max(found)[0], min(found)[0]
    best = found[long, long]
    tokens = _half(best / found[short, long], short, long)
    width = _half(best / found[long, short], short, long)
    return best * (1 + tokens / long) * (1 + width / long), tokens, width


def _half(slower: float, short: int, long: int) -> float:
    """Returns the length at which half the rate is reached, if `short` is `slower` times as slow as `long`."""
    slower = min(max(slower, 1.0), 0.9 * long / short)
    return (slower - 1) / (1 / short - slower / long)


def _link(rows: Sequence[tuple[str, int, int, float, float]], num_devices: int, is_cpu: bool, sharing: float) -> Link:
    """Returns the link that was measured.

    Args:
        rows: Exchanges, as `DeviceRates` has them.
        num_devices: Devices that it joins.
        is_cpu: Whether exchanges are work for the cores. See [Note: workers that share cores].
        sharing: How many threads share a core.
    """
    points: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for kind, members, num_bytes, seconds, processor_s in rows:
        if is_cpu:
            seconds = processor_s * sharing if sharing > 1.0 else min(seconds, members * processor_s)
        points[kind, members].append((float(num_bytes), seconds))
    exchanges = tuple(
        MeasuredCollective(kind, members, tuple(sorted(found))) for (kind, members), found in points.items()
    )
    members = min((found for kind, found in points if kind == "sum"), key=lambda found: abs(found - num_devices))
    measured = sorted(points["sum", members])
    (small, small_s), (large, large_s) = measured[0], measured[-1]
    # On a busy machine a sum of few bytes takes too long for others to be measured, or longer than one of many.
    if small_s >= large_s:
        small, small_s = 0.0, 0.0
    # for collectives that were not measured: a ring over all devices that sums as fast
    passed = 2 * (large - small) * (members - 1) / members
    return Link("measured", passed / max(large_s - small_s, 1e-9), small_s / 2, measured=exchanges)

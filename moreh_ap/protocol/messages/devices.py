"""Answers of workers about their devices: names, memory, measured rates, step times."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DescribeDevice:
    """Answer a `DeviceInfo`."""


@dataclass(frozen=True)
class DeviceInfo:
    """One worker's device.

    Attributes:
        name: Its name; "CPU" for a worker without one.
        memory_bytes: What it may use in all; a CPU worker's share of the machine.
        native_bf16: Whether it computes bfloat16 in hardware.
        num_threads: Threads that compute in a CPU worker; 0 elsewhere.
        num_cores: Cores that all CPU workers of the machine have together; 0 elsewhere.
        held_by_others_bytes: Of a GPU's memory what other processes hold.
        machine: Names the running system: equal for the workers of two hosts that share their cores.
    """

    name: str
    memory_bytes: int
    native_bf16: bool
    num_threads: int = 0
    num_cores: int = 0
    held_by_others_bytes: int = 0
    machine: str = ""


@dataclass(frozen=True)
class ProbeDevice:
    """Measure what devices and links do; answer `DeviceRates`. A collective.

    Attributes:
        bf16: Whether to measure products in bfloat16 too.
        per_host: Workers of each host; 0: all are on one.
    """

    bf16: bool
    per_host: int = 0


@dataclass(frozen=True)
class DeviceRates:
    """Measurements of one worker while all others measured too.

    Seconds of computing are those of its processor: of a CPU worker only while it had a core.

    Attributes:
        products: Operations a second of products of tokens x width with width x width, as (precision, tokens, width,
            rate): both long, tokens short, width short.
        elementwise: Bytes that a block's elementwise operations move a second, forward and backward together, as
            (precision, bytes of the forward, rate).
        start_s: Seconds that an operation of a forward takes however small it is.
        update_bytes_per_s: Bytes that a step of AdamW moves a second.
        exchanges: (kind, members, bytes of the whole, seconds, seconds of this worker's processor): a "sum", "gather"
            or "scatter" of a flat tensor, a "message" to a neighbour, and what a layer on the tensor axis exchanges of
            a hidden state, forward and backward: "crossing_sum", and "crossing_split" with sequence parallelism. All
            groups of a size exchange at a time. On several hosts those of groups inside of each host.
        between: The same of groups over all hosts: one worker of each, and all workers. Empty on one host.
    """

    products: tuple[tuple[str, int, int, float], ...]
    elementwise: tuple[tuple[str, int, float], ...]
    start_s: float
    update_bytes_per_s: float
    exchanges: tuple[tuple[str, int, int, float, float], ...]
    between: tuple[tuple[str, int, int, float, float], ...] = ()


@dataclass(frozen=True)
class ReportSteps:
    """Answer a `StepReport`."""


@dataclass(frozen=True)
class StepReport:
    """The times of the last training steps of one worker.

    Attributes:
        seconds: Of each of them, the latest last.
        peak_bytes: What the device's allocator held at most; on a CPU, resident memory since the worker's start.
    """

    seconds: tuple[float, ...]
    peak_bytes: int


@dataclass(frozen=True)
class ReportMemory:
    """Answer bytes of this worker's device: ``allocated``, ``peak``, ``free``, ``total``."""

    reset_peak: bool = False
    empty_cache: bool = False

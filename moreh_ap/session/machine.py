"""The accelerator as the planner sees it: catalogue figures where the device is known, measured ones where it is not.

Decides which figure is taken from where, and measures once a machine. Must not know models or plans.
"""

from __future__ import annotations

import contextlib
import platform
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from moreh_ap.errors import OptionError
from moreh_ap.planner.coefficients import COEFFICIENTS, Coefficients
from moreh_ap.planner.hardware import Cluster, Device, Link, find_device, find_link
from moreh_ap.planner.practice import MOREH_AP, Practice
from moreh_ap.runtime.messages import DeviceInfo, DeviceRates, ProbeDevice
from moreh_ap.session.remembered import Remembered
from moreh_ap.session.session import Session

FILE = Remembered("machine.json")

STEP_S = 0.005
"""Seconds of a step that this runtime adds whatever the model. Source: docs/benchmarks.md, an empty model."""


@dataclass(frozen=True)
class Machine:
    """What the planner is told of an accelerator.

    Attributes:
        cluster: Devices and links.
        practice: How this package's runtime carries out plans on such devices.
        coefficients: Constants of the estimates on such devices.
        key: Under which name what is learned of it is remembered.
    """

    cluster: Cluster
    practice: Practice
    coefficients: Coefficients
    key: str


def machine_of(session: Session) -> Machine:
    """Returns the accelerator behind a session; measures it if that was not done on this machine before.

    The smallest device counts where they differ. Measuring takes about a second, and needs every worker.
    """
    infos = session.devices()
    info = min(infos, key=lambda one: one.memory_bytes)
    native = all(one.native_bf16 for one in infos)
    key = f"{platform.node()}, {len(infos)} x {info.name}, torch {torch.__version__}"
    entry = FILE.look_up(key)
    rates = None if entry is None else _rates_of(entry)
    if rates is None:
        answers: list[DeviceRates] = session.outbox.submit(ProbeDevice(native)).result()
        rates = answers[0]
        with contextlib.suppress(OSError):  # where the folder cannot be written, it is measured again next time
            FILE.keep(key, {**asdict(rates), "products": _written(rates.products)})
    return machine_from(info, native, len(infos), rates, key)


def machine_from(info: DeviceInfo, native_bf16: bool, num_devices: int, rates: DeviceRates, key: str = "") -> Machine:
    """Returns a machine of equal devices with these rates."""
    coefficients = replace(COEFFICIENTS, step_s=STEP_S)
    sustained, half_tokens, half_width = _product_constants(rates, "bf16" if native_bf16 else "fp32")
    practice = MOREH_AP
    try:
        device = find_device(info.name)
        peak = device.peak_flops("bf16" if native_bf16 else "fp32")
        device = replace(device, memory_bytes=float(info.memory_bytes), sustained=min(1.0, sustained / peak))
    except OptionError:
        coefficients = replace(coefficients, half_tokens=half_tokens, half_width=half_width, memory=1.0)
        fp32_flops = _product_constants(rates, "fp32")[0]
        device = Device(
            info.name, float(info.memory_bytes), sustained if native_bf16 else fp32_flops, fp32_flops,
            rates.memory_bytes_per_s, sustained=1.0, native_bf16=native_bf16,
        )  # fmt: skip
    if info.name == "CPU":
        # What carries messages are the cores that compute, so nothing is hidden behind the computation.
        practice = replace(practice, hides_gradients=0.0, hides_gathers=0.0, hides_pipeline=0.0)
    link = _link(rates, num_devices) if num_devices > 1 else find_link("PCIe4")
    return Machine(Cluster(device, num_devices, num_devices, link, link), practice, coefficients, key)


def _product_constants(rates: DeviceRates, precision: str) -> tuple[float, float, float]:
    """Returns the rate of endless products, and the tokens and the width at which half of it is reached.

    Solves `rate = endless x m / (m + m0) x w / (w + w0)` for three measured products (`planner/compute.py`).
    """
    found = rates.products[precision]
    long, short = max(found)[0], min(found)[0]
    best = found[long, long]
    tokens = _half(best / found[short, long], short, long)
    width = _half(best / found[long, short], short, long)
    return best * (1 + tokens / long) * (1 + width / long), tokens, width


def _half(slower: float, short: int, long: int) -> float:
    """Returns the length at which half the rate is reached, if `short` is `slower` times as slow as `long`."""
    slower = min(max(slower, 1.0), 0.9 * long / short)
    return (slower - 1) / (1 / short - slower / long)


def _link(rates: DeviceRates, num_devices: int) -> Link:
    """Returns the link for which a ring over all devices sums as fast as was measured."""
    passed = 2 * (rates.large_sum_bytes - rates.small_sum_bytes) * (num_devices - 1) / num_devices
    seconds = max(rates.large_sum_s - rates.small_sum_s, 1e-9)
    half_s = rates.small_sum_s / 2  # a sum is a scatter and a gather
    return Link("measured", passed / seconds, half_s, queued_s=half_s, queued_sum_s=rates.small_sum_s)


def _written(products: dict[str, dict[tuple[int, int], float]]) -> dict[str, dict[str, float]]:
    return {name: {f"{m}x{w}": rate for (m, w), rate in found.items()} for name, found in products.items()}


def _rates_of(entry: dict[str, Any]) -> DeviceRates | None:
    """Returns remembered rates, None if the entry is somebody else's."""
    try:
        products = {
            name: {(int(m), int(w)): float(rate) for (m, w), rate in ((k.split("x"), r) for k, r in found.items())}
            for name, found in entry["products"].items()
        }
        return DeviceRates(**{**entry, "products": products})
    except (KeyError, TypeError, ValueError, AttributeError):
        return None

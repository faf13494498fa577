"""The accelerator models that the MoAI platform offers, which it calls flavours too.

Decides how many devices each has. Must not know which devices a machine has, nor plans.
"""

from __future__ import annotations

FLAVOURS = {
    "Small.64GB": 1,
    "Medium.128GB": 2,
    "Large.256GB": 4,
    "xLarge.512GB": 8,
    "1.5xLarge.768GB": 12,
    "2xLarge.1024GB": 16,
    "3xLarge.1536GB": 24,
    "4xLarge.2048GB": 32,
    "6xLarge.3072GB": 48,
    "8xLarge.4096GB": 64,
    "12xLarge.6144GB": 96,
    "24xLarge.12288GB": 192,
    "48xLarge.24576GB": 384,
}
"""The platform's flavours and the number of devices of 64 GB in each. Source: the platform's public manual."""

FLAVOUR_DEVICE_BYTES = 64 * 2**30
"""Memory of each device of a flavour."""


def flavour_of(num_devices: int, device_memory_bytes: float) -> str:
    """Returns the smallest flavour with at least `num_devices` devices, empty if none has, or if devices with
    `device_memory_bytes` are not those of a flavour.

    Example:
        >>> flavour_of(17, 64 * 2**30)
        '3xLarge.1536GB'
    """
    if abs(device_memory_bytes - FLAVOUR_DEVICE_BYTES) > 0.05 * FLAVOUR_DEVICE_BYTES:
        return ""
    return next((name for name, devices in FLAVOURS.items() if devices >= num_devices), "")

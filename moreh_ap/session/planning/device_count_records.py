"""How many devices a script used where fewer than all were faster, so that its next run starts with as many workers.

Decides by what a script is recognised, and which saved records are valid. Must not know how the number is chosen.
"""

from __future__ import annotations

import contextlib
import hashlib
import platform
import sys
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from moreh_ap.local.cache_files import CacheFile
from moreh_ap.settings import Options

FILE = CacheFile("device_counts.json")

LEAST_DEVICES = {"cuda": 1, "cpu": 2}
"""By the kind of device. Whether one process is faster than workers on CPUs is tried, not predicted
(`own_process/faster_place.py`)."""


@dataclass(frozen=True)
class DeviceRecord:
    """The number of devices that was chosen for the first model that a script trains.

    Attributes:
        model: The model and its batch, as `model_profiling.identity_of` says it.
        devices: The number of devices that is used; all where a later model needs them.
        all_devices: The number of devices of the accelerator.
        fewer_s: Predicted seconds of a step on the smaller number that was chosen.
        all_s: Predicted seconds of a step on all devices.
    """

    model: str
    devices: int
    all_devices: int
    fewer_s: float
    all_s: float

    def is_worse_than_all(self, seconds: float) -> bool:
        """Returns whether a measured step on fewer devices takes longer than was predicted for all."""
        return self.devices < self.all_devices and seconds > self.all_s


def script_key(device_type: str, num_devices: int) -> str:
    """Returns the name under which this script's record is saved; empty for a session without a file.

    A script with other arguments is another script. They are part of a hash, since they may be secret.

    Args:
        device_type: "cuda" or "cpu".
        num_devices: Devices of the accelerator.
    """
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if not file:
        return ""
    words = "\0".join([str(Path(file).resolve()), *sys.argv[1:]])
    digest = hashlib.sha256(words.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return f"{platform.node()}, {num_devices} x {device_type}, {Path(file).name} {digest}"


def look_up(key: str) -> DeviceRecord | None:
    """Returns the record of a script; None if there is none, or if it was edited into something invalid."""
    entry = dict(FILE.look_up(key) or {}) if key else {}
    entry.pop("date", None)
    try:
        record = DeviceRecord(**entry)
    except TypeError:
        return None
    is_valid = (
        isinstance(record.model, str)
        and type(record.devices) is type(record.all_devices) is int
        and 1 <= record.devices <= record.all_devices
        and type(record.fewer_s) is type(record.all_s) is float
        and record.fewer_s > 0.0
        and record.all_s > 0.0
    )
    return record if is_valid else None


def is_open(options: Options) -> bool:
    """Returns whether the script leaves the number of devices to us."""
    return options.devices is None and options.plan is None and not options.hosts


def of_script(options: Options, device_type: str, num_devices: int) -> DeviceRecord | None:
    """Returns the record of this script, None if there is none that holds for these options and devices.

    Args:
        options: The script's options.
        device_type: "cuda" or "cpu".
        num_devices: Devices of the accelerator.
    """
    if not is_open(options):
        return None
    record = look_up(script_key(device_type, num_devices))
    if record is None or record.all_devices != num_devices or record.devices < LEAST_DEVICES[device_type]:
        return None
    return record


def devices_at_start(options: Options, device_type: str, num_devices: int) -> int:
    """Returns how many workers to start: as many as the script's last run used, without a record all.

    Args:
        options: The script's options.
        device_type: "cuda" or "cpu".
        num_devices: Devices of the accelerator.
    """
    record = of_script(options, device_type, num_devices)
    return num_devices if record is None else record.devices


def keep(key: str, record: DeviceRecord) -> None:
    """Saves the record of a script."""
    date = datetime.now(timezone.utc).date().isoformat()
    _write(key, {**asdict(record), "date": date})


def keep_all(key: str) -> None:
    """Has the next run of a script that chose fewer devices start with all, and stay there."""
    record = look_up(key)
    if record is not None:
        keep(key, replace(record, devices=record.all_devices))


def forget(key: str) -> None:
    """Has the next run of a script start with all devices and choose anew."""
    _write(key, {})


def _write(key: str, entry: dict[str, object]) -> None:
    if key:
        with contextlib.suppress(OSError):  # the folder cannot be written: the next run chooses anew
            FILE.keep(key, entry)

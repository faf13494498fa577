"""The accelerators of this machine, their models, and how many devices the next process takes.

A model (the platform says flavour too) fixes a number of devices. Decides which models a machine has, and keeps the
choice in `accelerators.json`, one entry for each host name and kind of device. Must not know how it is asked for, nor
torch: command-line tools read this.
"""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass, replace

from moreh_ap.errors import OptionError
from moreh_ap.flavours import FLAVOUR_DEVICE_BYTES, FLAVOURS
from moreh_ap.local.cache_files import CacheFile

FILE = CacheFile("accelerators.json")
MOST_ACCELERATORS = 5
"""So many can be made on the platform. Source: the platform's public manual, toolkit."""

_LINK = "docs/toolkit.md#models"
_OWN_NAMES = {"cpu": "CPU", "cuda": "GPU"}


@dataclass(frozen=True)
class Supply:
    """The accelerators of a machine.

    Attributes:
        device_type: "cuda" or "cpu".
        num_devices: GPUs, or cores that processes may use.
        memory_bytes: Memory of the machine, or of the container; counts for CPU workers.
    """

    device_type: str
    num_devices: int
    memory_bytes: int = 0

    @property
    def most_devices(self) -> int:
        """The largest number a model may have: CPU workers may be twice the cores, GPUs are what they are."""
        return max(4, 2 * self.num_devices) if self.device_type == "cpu" else self.num_devices

    def __str__(self) -> str:
        if self.device_type == "cuda":
            return f"{self.num_devices} GPU{'s' if self.num_devices > 1 else ''}"
        cores = f"{self.num_devices} CPU core{'s' if self.num_devices > 1 else ''}"
        return f"{cores} and {self.memory_bytes / 2**30:.0f} GiB of memory"


@dataclass(frozen=True)
class Accelerators:
    """The accelerators that were set up, by number.

    Attributes:
        current: The accelerator that the next process takes.
        models: Name of the model of each; empty: all devices there are.
    """

    current: int
    models: dict[int, str]

    @property
    def model(self) -> str:
        """Model of the current one."""
        return self.models[self.current]

    def with_model(self, name: str) -> Accelerators:
        """Returns these with another model of the current one."""
        return replace(self, models={**self.models, self.current: name})


def load(device_type: str) -> Accelerators:
    """Returns the accelerators for this kind of device; one of all devices, number 0, where nothing was chosen."""
    entry = FILE.look_up(_key(device_type)) or {}
    try:
        models = {int(number): str(name) for number, name in sorted(entry["models"].items())}
        current = int(entry["current"])
    except (KeyError, TypeError, ValueError, AttributeError):
        return _DEFAULT  # nothing was chosen yet, or the file is broken: it is written anew
    return Accelerators(current, models) if current in models else _DEFAULT


def save(device_type: str, accelerators: Accelerators) -> None:
    """Keeps the accelerators.

    Raises:
        OptionError: The file cannot be written.
    """
    models = {str(number): name for number, name in sorted(accelerators.models.items())}
    try:
        FILE.keep(_key(device_type), {"current": accelerators.current, "models": models})
    except OSError as error:
        raise OptionError(
            f"the choice cannot be kept: {error}", "a folder that can be written", "export MOREH_AP_CACHE=FOLDER", _LINK
        ) from error


def models_of(supply: Supply, current: str = "") -> dict[str, int]:
    """Returns the models to choose from, with their numbers of devices, in the order of the list.

    GPUs: all of the platform's, in its order, whether there are enough GPUs or not. CPU workers: those of the
    platform's for which cores and memory are enough (64 GB a device). Behind them ours, ``GPU.n`` and ``CPU.n``: the
    one with all devices, the current one, and for CPU workers powers of two.
    """
    for_gpus = supply.device_type == "cuda"
    of_platform = {name: count for name, count in FLAVOURS.items() if for_gpus or _fits(supply, count)}
    numbers = {_own_number(supply.device_type, current)} - {0}
    if not for_gpus:
        numbers |= {2**power for power in range(supply.most_devices.bit_length())}
    if supply.num_devices not in of_platform.values():
        numbers.add(supply.num_devices)
    return {**of_platform, **{_own_name(supply, number): number for number in sorted(numbers)}}


def model_of_all(supply: Supply) -> str:
    """Returns the name of the model that has all devices there are."""
    return next(name for name, count in models_of(supply).items() if count == supply.num_devices)


def find_model(text: str, supply: Supply, current: str = "") -> str:
    """Returns the name of the model that a number of the list or a name means. Case, and the memory behind the dot of
    the platform's names, may be left out.

    Raises:
        OptionError: There is none, or this machine has too few devices for it.
    """
    models, wanted = models_of(supply, current), text.strip()
    if wanted.isascii() and wanted.isdigit():
        if not 1 <= int(wanted) <= len(models):
            raise _refusal(f"there is no number {wanted} in the list", supply)
        wanted = list(models)[int(wanted) - 1]
    own = _own_number(supply.device_type, wanted)
    if own:
        name, count, fits = _own_name(supply, own), own, own <= supply.most_devices
    else:
        names = {short: name for name in FLAVOURS for short in (name.lower(), name.lower().rpartition(".")[0])}
        name = names.get(wanted.lower(), "")
        if not name:
            raise _refusal(f"there is no model {wanted!r}", supply)
        count = FLAVOURS[name]
        fits = _fits(supply, count)
    if not fits:
        each = " of 64 GB" if name in FLAVOURS else ""
        raise _refusal(f"{name} has {count} device{'s' if count > 1 else ''}{each}", supply)
    return name


def chosen_devices(supply: Supply) -> int | None:
    """Returns how many devices the current accelerator has; None: all there are.

    Raises:
        OptionError: Its model is none, or has more devices than the machine.
    """
    name = load(supply.device_type).model
    if not name:
        return None
    count = FLAVOURS.get(name) or _own_number(supply.device_type, name)
    if not count:
        raise _refusal(f"{FILE.path} names the model {name!r}, which there is not", supply)
    if supply.device_type == "cuda" and count > supply.num_devices:
        raise _refusal(f"the accelerator's model is {name}, with {count} devices", supply)
    return count


_DEFAULT = Accelerators(0, {0: ""})


def _key(device_type: str) -> str:
    return f"{platform.node()}, {device_type}"


def _own_name(supply: Supply, number: int) -> str:
    return f"{_OWN_NAMES[supply.device_type]}.{number}"


def _own_number(device_type: str, name: str) -> int:
    """Returns the number of devices in a name such as ``CPU.4``, 0 where it is none."""
    found = re.fullmatch(rf"{_OWN_NAMES[device_type]}\.([1-9]\d{{0,4}})", name.strip(), re.IGNORECASE)
    return int(found.group(1)) if found else 0


def _fits(supply: Supply, count: int) -> bool:
    if count > supply.most_devices:
        return False
    return supply.device_type == "cuda" or count * FLAVOUR_DEVICE_BYTES <= 1.05 * supply.memory_bytes


def _refusal(fact: str, supply: Supply) -> OptionError:
    own = _OWN_NAMES[supply.device_type]
    fitting = [name for name in models_of(supply) if name not in FLAVOURS or _fits(supply, FLAVOURS[name])]
    return OptionError(
        f"{fact}; this machine has {supply}",
        f"{', '.join(fitting)}, and any other {own}.n up to {own}.{supply.most_devices}",
        f"moreh-switch-model {model_of_all(supply)}",
        _LINK,
    )

"""Devices and the links between them: a catalogue with sources, and how a name is found in it.

Decides which devices and links are known and what a cluster is. Must not know models, plans or which devices this
machine has; what was measured on it comes in as a `Device` or a `Link` like any other.
"""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from moreh_ap.errors import OptionError
from moreh_ap.planner.cost.measured_collectives import MeasuredCollective

__all__ = ["Cluster", "Device", "Link", "devices", "find_cluster", "find_device", "find_link", "links"]

USABLE_FRACTION = 0.925
"""Fraction of a device's memory that a program can fill before it runs out: contexts of CUDA and NCCL take the rest."""


@dataclass(frozen=True)
class Device:
    """One accelerator as a process sees it; a card with two devices counts as two.

    Attributes:
        name: Its name in the catalogue.
        memory_bytes: What a process can allocate on an empty device.
        bf16_flops: Peak rate of dense products in its best 16-bit precision.
        fp32_flops: Peak rate of dense products on float32 values; without tf32, which PyTorch leaves off unless told.
        memory_bytes_per_s: Peak bandwidth of its memory.
        fp8_flops: Peak rate of dense products in 8 bits; 0.0 where there is none.
        sustained: Part of the peak that large products keep up through a training run. Source: the "maximum achievable
            matmul FLOPS" of https://github.com/stas00/ml-engineering; for A100, H100, MI250 and T4 lower than that, by
            the published runs of docs/planner.md, since power limits hold longer than a benchmark lasts.
        attention: How well the usual fused attention uses the device, compared with an A100. Source: Shah et al.,
            "FlashAttention-3", 2024, section 1, on FlashAttention-2: 35 % of an H100's peak, 70 % of an A100's.
        native_bf16: Whether it computes bfloat16 in hardware.
        elementwise: Where that was measured, what elementwise work reaches by how much there is of it: bytes that the
            operations of a part's forward move, and bytes a second, rising. Empty: what its memory does.
        sharing: How many devices share what computes; what some leave idle, the others use. CPU workers share cores.
        aliases: Other names for it.
        intra: Name of the link inside a node.
        inter: Name of the link between nodes.
        devices_per_node: How many a node usually has.
        source: Where the peak rates and the memory are from.
        checked: The day on which they were compared with that page, "not fetched" where it could not be read.
    """

    name: str
    memory_bytes: float
    bf16_flops: float
    fp32_flops: float
    memory_bytes_per_s: float
    fp8_flops: float = 0.0
    sustained: float = 0.75
    attention: float = 1.0
    native_bf16: bool = True
    elementwise: tuple[tuple[float, float], ...] = ()
    sharing: float = 1.0
    aliases: tuple[str, ...] = ()
    intra: str = "PCIe4"
    inter: str = "Ethernet-100"
    devices_per_node: int = 8
    source: str = ""
    checked: str = ""

    @property
    def usable_bytes(self) -> float:
        """Bytes of its memory that a plan may reserve."""
        return self.memory_bytes * USABLE_FRACTION

    def peak_flops(self, precision: str) -> float:
        """Returns the peak rate of products in `precision`: "fp32", "bf16", "fp16" or "fp8"."""
        if precision == "fp8" and self.fp8_flops:
            return self.fp8_flops
        return self.fp32_flops if precision == "fp32" else self.bf16_flops


@dataclass(frozen=True)
class Link:
    """A way between devices.

    Attributes:
        name: Its name in the catalogue.
        bytes_per_s: What a device sends, or inside `Cluster.inter` what a node sends, each way, as collectives see it.
        latency_s: What an exchange costs for each device, or node, that it has to reach, apart from its bytes.
        queued_s: The same for each of many exchanges that are started one after another without waiting.
        queued_sum_s: The same where they are sums to all, which go up and down a tree, instead of gathers or scatters.
        crowding_s: Host seconds that each member of any exchange adds in a program that uses this link between nodes.
        measured: What exchanges take by kind and members; where there are any, they count instead of the figures.
        source: Where the peak rate is from, of which collectives reach a part.
        checked: As for a device.
    """

    name: str
    bytes_per_s: float
    latency_s: float
    queued_s: float = 5e-6
    queued_sum_s: float = 5e-6
    crowding_s: float = 0.0
    measured: tuple[MeasuredCollective, ...] = ()
    source: str = ""
    checked: str = ""


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal devices.

    Attributes:
        device: Each device.
        num_devices: All of them.
        devices_per_node: Those of one node.
        intra: The link of one device to others of its node.
        inter: The link of one node, all its devices together, to other nodes.
    """

    device: Device
    num_devices: int
    devices_per_node: int
    intra: Link
    inter: Link

    @property
    def num_nodes(self) -> int:
        """Nodes, the last of which may be partly used."""
        return -(-self.num_devices // self.devices_per_node)


@lru_cache(maxsize=1)
def _catalogue() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(Path(__file__).with_name("hardware.json").read_text(encoding="utf-8"))
    return loaded


@lru_cache(maxsize=1)
def devices() -> tuple[Device, ...]:
    """Returns every device of the catalogue."""
    return tuple(Device(**{**one, "aliases": tuple(one["aliases"])}) for one in _catalogue()["devices"])


@lru_cache(maxsize=1)
def links() -> tuple[Link, ...]:
    """Returns every link of the catalogue."""
    return tuple(Link(**one) for one in _catalogue()["links"])


def find_device(name: str) -> Device:
    """Returns the device of that name or alias; capitals, spaces and signs do not matter.

    Raises:
        OptionError: There is none; the error names the nearest.

    Example:
        >>> find_device("nvidia h100 80gb hbm3").name
        'H100-80GB'
    """
    wanted = _plain(name)
    names = {_plain(alias): device for device in devices() for alias in (device.name, *device.aliases)}
    if wanted in names:
        return names[wanted]
    near = difflib.get_close_matches(wanted, names, n=3, cutoff=0.5)
    known = dict.fromkeys(names[one].name for one in near) or [device.name for device in devices()]
    raise OptionError(f"device {name!r} is unknown", ", ".join(known), f"--devices 8x{next(iter(known))}")


def find_link(name: str) -> Link:
    """Returns the link of that name.

    Raises:
        OptionError: There is none.
    """
    for link in links():
        if _plain(link.name) == _plain(name):
            return link
    raise OptionError(f"link {name!r} is unknown", ", ".join(link.name for link in links()))


def find_cluster(
    text: str, num_devices: int | None = None, devices_per_node: int | None = None, inter: str = ""
) -> Cluster:
    """Returns the cluster that `text` describes, such as "64xMI250" or "H100", with its usual nodes and links.

    Args:
        text: A device, or a number of devices and a device.
        num_devices: How many, where the text does not say; by default one node.
        devices_per_node: Devices of a node, by default as many as the device's nodes usually have.
        inter: Name of the link between nodes, by default the device's usual one.

    Raises:
        OptionError: The device or link is unknown, or a number is below 1.

    Example:
        >>> found = find_cluster("64xMI250")
        >>> found.num_devices, found.num_nodes, found.device.name
        (64, 8, 'MI250')
    """
    match = re.fullmatch(r"\s*(?:(\d+)\s*[x*×]\s*)?(.+?)\s*", text)
    if match is None:
        raise OptionError(f"devices {text!r}", "a number and a device", "--devices 8xH100")
    device = find_device(match[2])
    per_node = device.devices_per_node if devices_per_node is None else devices_per_node
    count = int(match[1]) if match[1] else (per_node if num_devices is None else num_devices)
    if count < 1 or per_node < 1:
        raise OptionError(f"{count} devices, {per_node} a node", "at least 1", "--devices 8xH100")
    return Cluster(device, count, min(per_node, count), find_link(device.intra), find_link(inter or device.inter))


def _plain(name: str) -> str:
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    for maker in ("nvidia", "amdinstinct", "amd", "instinct", "tesla", "geforce"):
        plain = plain.removeprefix(maker) if plain != maker else plain
    return plain

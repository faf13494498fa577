"""Which hosts have the workers, after one is lost and once others have joined.

Decides whether some hosts can have all workers, and how many of those that wait are used. Must not know what is sent to
agents.

[Note: who keeps copies]
Each host keeps the copies of its own workers and those of the host before it. So what the workers of a lost host held
is there as long as the host behind it lives: behind it among the hosts that took the last copy, or to which workers
have been dealt since, once these got all commands. Before that, hosts that have just joined may be lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from moreh_ap.hosts.reachability import slowest
from moreh_ap.runtime.host.host_connection import HostConnection
from moreh_ap.runtime.recovery.other_devices import Joined


def why_none_on(hosts: Sequence[HostConnection], kept_by: Sequence[HostConnection]) -> str:
    """Returns why no workers can go on on these hosts; empty if they can.

    Args:
        hosts: The hosts, none of which is lost.
        kept_by: Those that took the last copy of what workers hold, in order; none: there is no copy.
    """
    if not hosts:
        return "no host is left"
    lost = [one not in hosts for one in kept_by]
    if any(one and other for one, other in zip(lost, [*lost[1:], *lost[:1]])):
        return "the hosts that keep the copies of what their workers held are lost, too"
    return ""


def why_fewer_on(hosts: Sequence[HostConnection], num_workers: int, device_type: str) -> str:
    """Returns why not all workers can be on these hosts; empty if they can.

    Args:
        hosts: The hosts.
        num_workers: How many workers there are on all of them.
        device_type: Of the workers, "cuda" or "cpu".
    """
    if num_workers % len(hosts):
        return f"{num_workers} workers cannot be dealt evenly to {len(hosts)} hosts"
    for one in hosts:
        most = most_on(one, device_type)
        if most < num_workers // len(hosts):
            return f"{one.name} has {most:.0f} GPUs, for {num_workers // len(hosts)} workers"
    return ""


def most_on(host: HostConnection, device_type: str) -> float:
    """Returns how many workers a host can have; there may be any number without GPUs."""
    return len(host.report.gpus) if device_type == "cuda" else math.inf


def fewer_on(hosts: Sequence[HostConnection], num_workers: int, device_type: str) -> int:
    """Returns how many workers these hosts can share evenly, fewer than there are; 0: none."""
    most = min((num_workers - 1) // len(hosts), *(most_on(one, device_type) for one in hosts))
    return int(most) * len(hosts)


def taken_of(waiting: Sequence[HostConnection], num_left: int, num_workers: int) -> list[HostConnection]:
    """Returns the hosts that are used of those that wait: as many as workers can be dealt to evenly.

    Args:
        waiting: Those that wait.
        num_left: Hosts that are used already.
        num_workers: How many workers there are on all of them.
    """
    for count in range(len(waiting), 0, -1):
        if num_left + count <= num_workers and num_workers % (num_left + count) == 0:
            return list(waiting[:count])
    return []


def joined_by(
    used: Sequence[HostConnection],
    waiting: Sequence[HostConnection],
    num_workers: int,
    num_workers_on: Callable[[int, int], int],
) -> tuple[list[HostConnection], Joined | None]:
    """Returns the hosts to use, and what joins with those that are new; None: none is.

    Args:
        used: The hosts that are used.
        waiting: Those that wait.
        num_workers: How many workers there are.
        num_workers_on: As `HostPool.num_workers_on`.
    """
    num_wanted = num_workers_on(len(used) + len(waiting), num_workers)
    taken = list(waiting) if num_wanted > num_workers else taken_of(waiting, len(used), num_workers)
    hosts = [*used, *taken]
    if not taken:
        return hosts, None
    names, before = ", ".join(one.name for one in taken), ", ".join(one.name for one in used)
    fact = f"{names} joined {before}: {num_wanted} workers on {len(hosts)} hosts, {num_workers} on {len(used)} before."
    links = [one.link for one in taken if one.link is not None]
    link = slowest(links) if len(links) == len(taken) else None
    return hosts, Joined(fact, num_wanted, tuple(one.host for one in hosts), link)

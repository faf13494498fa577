"""Why workers on more devices or fewer take over: errors from what starts workers to what chooses plans."""

from __future__ import annotations

from typing import NamedTuple

from moreh_ap.errors import WorkerLostError
from moreh_ap.hosts.reachability import Speed


class Joined(NamedTuple):
    """Devices that can be used and have no workers.

    Attributes:
        fact: What they are, for the log.
        num_workers: How many workers there can be with them.
        hosts: All hosts, with those that have joined, as they were given; none: the devices are this machine's.
        between: The slowest link between those that have joined and the others; None: that is not known.
    """

    fact: str
    num_workers: int
    hosts: tuple[str, ...]
    between: Speed | None = None


class DevicesJoinedError(WorkerLostError):
    """Nothing is lost: the workers are ended, so that others take over on more devices.

    Args:
        joined: These devices.

    Attributes:
        num_workers, hosts, between: As in `Joined`.
    """

    def __init__(self, joined: Joined) -> None:
        super().__init__(joined.fact)
        self.num_workers, self.hosts, self.between = joined.num_workers, joined.hosts, joined.between


class NoOthersError(WorkerLostError):
    """A worker was lost, and as many as before cannot be started any more. Fewer may be, under other plans.

    Attributes:
        num_workers: How many can be at most; None: that is not known.
        hosts: The hosts that they share evenly, as they were given; none: the devices are this machine's, or it is not
            known which host cannot start any.
    """

    num_workers: int | None = None
    hosts: tuple[str, ...] = ()

    @staticmethod
    def on_hosts(reason: str, num_workers: int, hosts: tuple[str, ...]) -> NoOthersError:
        """Returns the error for workers that some hosts cannot have all, for a reason, but so many of them."""
        error = NoOthersError(reason)
        error.num_workers, error.hosts = num_workers, hosts
        return error

    def after(self, lost: WorkerLostError, in_short: str) -> NoOthersError:
        """Returns the same, which says first who was lost."""
        error = NoOthersError(f"{in_short} {self.fact}", lost.allowed, lost.fix, lost.link)
        error.num_workers, error.hosts = self.num_workers, self.hosts
        return error

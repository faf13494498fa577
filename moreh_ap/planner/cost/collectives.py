"""How long groups of devices need to exchange bytes, by where their members are.

Decides the cost of collectives and messages from link figures. Must not know which tensors are exchanged, or why.

[Note: rings]
A ring over `n` devices passes (n - 1) / n of all bytes through every device for a gather or a scatter, twice that for a
sum. Inside a node a device's own link counts. Between nodes all groups that cross share the node's link: a group with
`k` members in a node has as much of it as the `devices / k` others that cross at the same time leave it. Source: Thakur
et al., "Optimization of Collective Communication Operations in MPICH", 2005, section 3; NCCL's bus bandwidth,
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.

[Note: starts]
An exchange that every device waits for pays the link's latency for every node it reaches. Exchanges that are started
one after another, as buckets of gradients are, pay a smaller part of it each: they follow each other around the ring.

[Note: measured links]
Where exchanges were measured, each kind takes what it took then; rings and starts are not asked. On CPU workers kinds
differ greatly, an exchange is work for the cores, and groups share these.
"""

from __future__ import annotations

from dataclasses import dataclass

from moreh_ap.planner.cost.coefficients import Coefficients
from moreh_ap.planner.cost.hardware import Cluster
from moreh_ap.planner.cost.measured_collectives import MeasuredCollective, nearest

__all__ = [
    "Group",
    "PipelineMessages",
    "gather_s",
    "group_of",
    "pipeline_messages",
    "queued_gathers_s",
    "queued_sums_s",
    "tensor_sum_s",
]

INTERRUPTED = 0.5
"""Part of the latency that an exchange pays which cannot follow another at once."""


@dataclass(frozen=True)
class Group:
    """Devices that exchange bytes, as seen by one of them.

    Attributes:
        size: Members.
        nodes: Nodes over which they are spread.
        bytes_per_s: What passes through a member, each way.
        start_s: Seconds that an exchange takes however few bytes there are.
        queued_s: The same for each of many that are started one after another.
        queued_sum_s: The same where they are sums.
        measured: Exchanges that were measured; they count instead. See [Note: measured links].
    """

    size: int
    nodes: int
    bytes_per_s: float
    start_s: float
    queued_s: float
    queued_sum_s: float
    measured: tuple[MeasuredCollective, ...] = ()

    def exchange_s(self, kind: str, num_bytes: float) -> float | None:
        """Returns what a measured exchange of this kind takes, None where none was measured."""
        found = nearest(self.measured, kind, self.size)
        return None if found is None else found.takes_s(num_bytes)


def group_of(size: int, stride: int, cluster: Cluster, interrupted: bool = False) -> Group:
    """Returns the group of `size` devices whose numbers differ by `stride`. See [Note: rings].

    Args:
        size: Members.
        stride: How far they are apart.
        cluster: The devices.
        interrupted: Whether other exchanges between nodes come in between, so that none can follow the last at once.
    """
    per_node, intra, inter = cluster.devices_per_node, cluster.intra, cluster.inter
    members = max(1, min(size, per_node // stride))
    nodes = -(-size // members)
    if nodes == 1:
        return Group(size, 1, intra.bytes_per_s, intra.latency_s, intra.queued_s, intra.queued_s, intra.measured)
    share = inter.bytes_per_s * members / per_node
    hops = nodes - 1
    queued = hops * (inter.latency_s * INTERRUPTED if interrupted else inter.queued_s)
    return Group(
        size, nodes, min(share, intra.bytes_per_s), hops * inter.latency_s, queued,
        hops * (inter.latency_s * INTERRUPTED if interrupted else inter.queued_sum_s), inter.measured,
    )  # fmt: skip


def gather_s(num_bytes: float, group: Group) -> float:
    """Returns the seconds until every device has, or has summed, its part of `num_bytes` in all."""
    if group.size == 1:
        return 0.0
    return group.start_s + num_bytes * (group.size - 1) / group.size / group.bytes_per_s


def tensor_sum_s(num_bytes: float, is_split: bool, group: Group) -> float | None:
    """Returns what a measured sum of a hidden state over the tensor axis takes, None where none was measured.

    Args:
        num_bytes: Bytes of the whole hidden state.
        is_split: Whether it is scattered after one layer and gathered before the next.
        group: Devices of the tensor axis.
    """
    both_s = group.exchange_s("crossing_split" if is_split else "crossing_sum", num_bytes)
    return None if both_s is None else both_s / 2.0


def queued_gathers_s(num_bytes: float, pieces: float, group: Group, kind: str = "gather") -> float:
    """Returns how long gathers or scatters of `num_bytes` in `pieces` take. See [Note: starts].

    Args:
        num_bytes: All bytes.
        pieces: How many exchanges they are spread over.
        group: Who takes part.
        kind: "gather" or "scatter", which differ where they were measured.
    """
    if group.size == 1:
        return 0.0
    each_s = group.exchange_s(kind, num_bytes / pieces)
    if each_s is not None:
        return pieces * each_s
    return group.start_s + pieces * group.queued_s + num_bytes * (group.size - 1) / group.size / group.bytes_per_s


def queued_sums_s(num_bytes: float, pieces: float, group: Group) -> float:
    """Returns how long sums to all of `num_bytes` in `pieces` take. See [Note: starts]."""
    if group.size == 1:
        return 0.0
    each_s = group.exchange_s("sum", num_bytes / pieces)
    if each_s is not None:
        return pieces * each_s
    moved = 2.0 * num_bytes * (group.size - 1) / group.size
    return group.start_s + pieces * group.queued_sum_s + moved / group.bytes_per_s


@dataclass(frozen=True)
class PipelineMessages:
    """Seconds of one micro-batch's message over each boundary between neighbours of a pipeline.

    Attributes:
        inside: Boundaries whose sender and receiver are in one node.
        inside_s: What a message over one of them takes.
        across: Boundaries between nodes.
        across_s: What a message over one of them takes.
    """

    inside: int
    inside_s: float
    across: int
    across_s: float

    @property
    def slowest_s(self) -> float:
        """Seconds of a message over the slowest boundary, which sets the pace."""
        return max(self.inside_s if self.inside else 0.0, self.across_s if self.across else 0.0)


def pipeline_messages(
    num_bytes: float, distance: int, cluster: Cluster, coefficients: Coefficients, members: int
) -> PipelineMessages:
    """Returns what a message takes over the boundaries of a pipeline, while all of its devices send one.

    A pipeline whose neighbours are close can still reach over several nodes. Then some of its boundaries are between
    nodes. A device that sends over one has its part of the node's link.

    Args:
        num_bytes: Bytes of a message.
        distance: How far neighbours are apart.
        cluster: The devices.
        coefficients: Constants of networks.
        members: Devices of the pipeline.
    """
    per_node, intra, inter = cluster.devices_per_node, cluster.intra, cluster.inter
    nodes = -(-members * distance // per_node)
    across = min(nodes, members) - 1 if nodes > 1 else 0
    near, far = nearest(intra.measured, "message", members), nearest(inter.measured, "message", members)
    inside_s = coefficients.message_s + intra.latency_s + num_bytes / intra.bytes_per_s
    across_s = coefficients.message_s + num_bytes / (inter.bytes_per_s / per_node)
    return PipelineMessages(
        members - 1 - across,
        inside_s if near is None else near.takes_s(num_bytes),
        across,
        across_s if far is None else far.takes_s(num_bytes),
    )

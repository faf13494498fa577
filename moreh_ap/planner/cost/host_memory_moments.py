"""The moments at which a device may be fullest while its parameters are in host memory (`offload=all`).

Decides what is on such a device at each of these moments. Must not know architectures, devices or seconds.

[Note: moments with parameters in host memory]
Neither weights nor gradients are on the device but those of the unit that computes. With `s` shards, `c` bytes of each
value in which the plan computes, a block's parameters `B`, those of first and last layers that are units of their own
`F` and `H`, and those of the root `R`, which are gathered for the whole of a forward or backward:

- A unit arrives. Of one shard, FSDP2 copies one parameter after another: in float32, then cast, and dropped, so that
  the largest is there with `c + 4` bytes. Of several shards, the gathered buffer is there beside what it is copied to:
  twice `c`; and while a unit computes, the buffer of the next one is on its way: `cB`. A mesh of one gathers nothing
  ahead.
- A block's backward. Its weights `cB`; `4B` of the block whose backward was before, which FSDP2 keeps until it reduces
  the next; what the block computes again; and the next one on its way. At the begin are all of its activations, with
  the gradients of its last product and of that product's input; at the end all of its gradients, `cB`, and what the
  backward of its first norm makes.
- A unit's gradients leave: the buffer in float32 with the gradients, then with its shard, `4 / s`, which is copied. Of
  several shards, the last parameter's gradient is still there then, of a unit that is one layer all of it.
- With replicas, FSDP2 keeps that shard of every unit until the backward ends.

Source: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (`unshard`, `wait_for_unshard`, `post_backward`) and
_fsdp_collectives.py (`foreach_reduce`), and `scripts/check_memory.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from moreh_ap.plan import Plan

__all__ = ["Moment", "Parts", "moments_on_host"]

Moment = tuple[float, float, float, float]
"""Bytes of activations, of logits and of what is temporary, and of gradients that are there."""


@dataclass(frozen=True)
class Parts:
    """The quantities of [Note: moments with parameters in host memory].

    Attributes:
        computed: Bytes of a value of the plan's precision.
        block: Bytes of a block while it is gathered.
        block_trained: Parameter elements of a block that get gradients.
        blocks: Number of blocks.
        rest: Bytes of what the root gathers.
        rest_trained: Parameter elements of the root that get gradients.
        first_unit: Parameter elements of the first layers, if they are a unit.
        last_unit: Parameter elements of the last layers, if they are a unit.
        units_trained: Whether these two get gradients.
        made_twice: Parameter elements whose gradient is made once more at the end: what first and last layers share.
        waiting: Bytes of gradients of last layers that are in the root, which wait for the others there.
        all_kept: Bytes of all activations.
        everything: Bytes of activations of a block whose backward begins.
        after_first: Bytes of activations that are left once the last block's backward is through.
        next_to_last: Bytes that the last block but one keeps until it is computed again.
        last: Bytes that the last block keeps.
        closing: Bytes of the gradients that the largest of a block's closing products makes first.
        norm: Bytes that the backward of a block's first norm makes.
        results: Bytes of results that stay.
        loss: Bytes that the loss makes of logits.
        of_logits: Bytes of the gradients of logits.
        unpacked: Bytes of a packed matrix while it is unpacked.
    """

    computed: float
    block: float
    block_trained: float
    blocks: int
    rest: float
    rest_trained: float
    first_unit: float
    last_unit: float
    units_trained: bool
    made_twice: float
    waiting: float
    all_kept: float
    everything: float
    after_first: float
    next_to_last: float
    last: float
    closing: float
    norm: float
    results: float
    loss: float
    of_logits: float
    unpacked: float


def moments_on_host(parts: Parts, plan: Plan) -> list[Moment]:
    """Returns the moments of [Note: moments with parameters in host memory]."""
    computed, shards = parts.computed, plan.shard
    is_alone = shards == 1
    ahead = 0.0 if is_alone else parts.block
    arriving = computed + 4.0 if is_alone else 2.0 * computed
    leaving = max(computed + 4.0, 8.0) if is_alone else computed + 4.0 + 4.0 / shards
    summed = 4.0 / shards if plan.replicate > 1 else 0.0  # bytes of each parameter that was reduced
    own, before = computed * parts.block_trained, 4.0 * parts.block_trained
    of_first, of_last = (parts.first_unit, parts.last_unit) if parts.units_trained else (0.0, 0.0)
    begin = parts.everything + parts.closing
    end = own + parts.norm
    busy = parts.rest + parts.block + parts.waiting + parts.unpacked

    def backward(kept: float, temporary: float) -> list[Moment]:
        """Returns begin and end of a block's backward, with `kept` of other blocks."""
        return [(kept + begin, parts.results, temporary, 0.0), (kept, parts.results, temporary + end, 0.0)]

    in_loss = parts.rest + (0.0 if is_alone else computed * parts.last_unit or parts.block)
    moments = [
        (parts.all_kept, parts.results + parts.loss, in_loss, 0.0),
        (parts.all_kept, parts.results + parts.of_logits, parts.rest + parts.waiting, 0.0),
    ]
    if parts.last_unit:
        in_head = max(arriving * parts.last_unit, computed * (parts.last_unit + of_last) + ahead)
        moments += [
            (parts.all_kept, parts.results + parts.of_logits, parts.rest + in_head, 0.0),
            (parts.all_kept, parts.results, parts.rest + ahead + leaving * of_last, 0.0),
        ]
    reduced = summed * of_last
    moments += backward(parts.all_kept - parts.last, busy + ahead + 4.0 * of_last + reduced)
    if parts.blocks > 1:
        reduced += summed * parts.block_trained
        moments += backward(parts.after_first - parts.next_to_last, busy + ahead + before + reduced)
        reduced = summed * (of_last + (parts.blocks - 1) * parts.block_trained)
        next_unit = 0.0 if is_alone else computed * parts.first_unit
        moments += backward(0.0, busy + next_unit + before + reduced)
    reduced = summed * (of_last + parts.blocks * parts.block_trained)
    at_end = parts.rest + parts.waiting + before + reduced
    in_first = max(arriving * parts.first_unit, computed * (parts.first_unit + of_first))
    reduced_first = reduced + summed * of_first
    return [
        *moments,
        (0.0, parts.results, at_end + in_first + computed * parts.made_twice, 0.0),
        (0.0, parts.results, parts.rest + parts.waiting + leaving * of_first + reduced, 0.0),
        (0.0, parts.results, max(4.0 * of_first, before) + leaving * parts.rest_trained + reduced_first, 0.0),
    ]

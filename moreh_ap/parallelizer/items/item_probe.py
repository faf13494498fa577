"""A few items of a batch run together, and shared among the workers, who exchange numbers where items meet.

Decides how that is tried where no tensor has a row for each item: pictures of unequal size, lists of targets, graphs.
Must not know what follows from it (`call_preparation.py`).

[Note: items]
All items that are tried run together, then the first of them, then the others. A number that is for all of them the
sum of the other two, or the larger one, is one in which items meet (`item_rules.py`). Then the items are shared among
the workers as in a real call, whose results, gradients and buffers are compared with those of the run together. What
is not shown that way runs whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_unflatten

from moreh_ap.parallelizer.call.call import Call
from moreh_ap.parallelizer.call.forward import EagerForward
from moreh_ap.parallelizer.data.fsdp import record_block_order
from moreh_ap.parallelizer.data.opened_blocks import joining_opened
from moreh_ap.parallelizer.items.item_recorder import ItemRecorder
from moreh_ap.parallelizer.items.item_reduction import ItemReduction, ItemRules
from moreh_ap.parallelizer.items.item_results import gathered
from moreh_ap.parallelizer.items.item_rules import find_counts, find_merge, find_rules, find_sizes
from moreh_ap.parallelizer.loss.mean_rules import NO_RULES
from moreh_ap.parallelizer.rng.policy import RandomPolicy
from moreh_ap.parallelizer.trial.agreement import everywhere
from moreh_ap.parallelizer.trial.dry_run import NoDropout, Refused, attempt, clear_gradients, untouched
from moreh_ap.parallelizer.trial.hidden_terms import filled, zeros_of
from moreh_ap.parallelizer.trial.joined_probe import JoinedProbe
from moreh_ap.parallelizer.trial.probe_verdict import verdict_of
from moreh_ap.parallelizer.trial.row_comparison import names_of, random_weight, take_gradients, without_meaning
from moreh_ap.parallelizer.trial.split_verdict import SplitVerdict
from moreh_ap.protocol.batch import row_range
from moreh_ap.protocol.objects.batch_items import Arguments, Items

_FEWEST_ITEMS, _ITEMS_A_WORKER = 5, 2
"""How many items run together in a trial, if the batch has so many: at least so many, and so many for each worker."""


@joining_opened
def check_items(call: Call, items: Items, *, recomputes: bool) -> SplitVerdict:
    """Returns whether the forward of `call` may run on some items of the batch on each worker.

    A collective, as `check_split` is.

    Args:
        call: What will run; its mode does not matter.
        items: The items of its arguments.
        recomputes: Whether blocks compute their activations again in the backward.
    """
    call = replace(call, mode="unsplit", random=call.random.for_probe(), kinds=None, rules=NO_RULES, joined=False)
    with untouched(call.module):
        for counts in (True, False):
            probe = ItemProbe(call, items, counts=counts, recomputes=recomputes)
            found = verdict_of(probe)
            if found.split or not probe.saw_counted:
                break
            clear_gradients(call.module)
        zeros = zeros_of(call.module)
        if found.split and not everywhere(not zeros, call):  # see `hidden_terms.py`
            with filled(zeros):
                again = verdict_of(ItemProbe(replace(call, grad=False), items, counts=counts, recomputes=recomputes))
            found = found if again.split else again
        rules = replace(probe.rules, may_lack=probe.may_lack()) if found.split else probe.rules
    return replace(found, items=rules, kinds=(), attributes={}) if found.split else found


class ItemProbe(JoinedProbe):
    """The common run of some items, and one run on each worker of its share of them. A collective; see `Probe`.

    Args:
        call: What is run, in mode "unsplit".
        items: The items of the batch.
        counts: Whether numbers of true elements, and other sums that are whole numbers, may be those of all items.
        recomputes: Whether blocks compute their activations again in the backward.

    Attributes:
        rules: What was learned.
        saw_counted: Whether there were such sums.
    """

    _least_rounding = 0.0

    def __init__(self, call: Call, items: Items, *, counts: bool, recomputes: bool) -> None:
        self._items, self._counts, self._recomputes = items, counts, recomputes
        args, kwargs = items.select(range(items.count))
        super().__init__(call, args, kwargs, items.count, [None] * len(tree_leaves((args, kwargs))))
        self.numbers, self.rules = [], ItemRules()  # which leaf is which, another choice of items does not tell
        self.saw_counted = False

    def _choose_rows(self) -> list[int]:
        number = min(self.rows, max(_FEWEST_ITEMS, _ITEMS_A_WORKER * self.call.axis.size))
        return [place * self.rows // number for place in range(number)]

    def _arguments(self, chosen: Sequence[int]) -> Arguments:
        self._ran = chosen
        return self._items.select(chosen)

    def _policy(self, chosen: Sequence[int]) -> RandomPolicy:
        return self.call.random

    def _surroundings(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.call.random.covers(self.call.device) else NoDropout()

    def compare_draws(self) -> None:
        """Finds the rules, draws among them.

        Raises:
            Refused: The items draw in a way that is not known.
        """
        chosen = self.chosen
        number = len(chosen) // 2
        first, others = chosen[:number], chosen[number:]
        whole = self._note(chosen).places
        is_ragged = any(map(any, self._items.differing_sizes()))
        totals = find_sizes(whole, self._note(first).places, self._note(others).places, is_ragged=is_ragged)
        if self._counts:  # of which there are more in larger pictures
            counted = find_counts(whole, self._note(first, totals).places, self._note(others, totals).places)
            self.saw_counted = bool(counted)
            totals.update(counted)
        self.rules = find_rules(
            whole,
            self._note(first, totals).places,
            self._note(others, totals).places,
            totals=totals,
            items=(len(first), len(others)),
            sizes=set(zip(self._sizes(first), self._sizes(others))),
            counts=self._counts,
        )
        if self._recomputes and (self.rules.draws or self.rules.rounds):
            raise Refused(
                "items draw random numbers, which blocks that are computed again would draw from another place"
            )

    def _note(self, chosen: Sequence[int], totals: Mapping[Any, Any] | None = None) -> ItemRecorder:
        recorder = ItemRecorder(self.call.device, counts=self._counts, totals=totals)
        self._forward(chosen, recorder)
        self.saw |= recorder.saw
        return recorder

    def _forward(self, chosen: Sequence[int], recorder: ItemRecorder) -> None:
        args, kwargs = self._arguments(chosen)
        with self._from_the_same_state(), self._surroundings():
            EagerForward(replace(self.call, grad=False), args, kwargs, reduction=recorder)

    def _sizes(self, chosen: Sequence[int]) -> list[int]:
        """Returns the sums over some items of the sizes of each dim of each tensor."""
        shapes = [
            [
                size
                for leaf in tree_leaves(self._items.select([item]))
                if isinstance(leaf, Tensor)
                for size in (leaf.shape)
            ]
            for item in chosen
        ]
        return [sum(sizes) for sizes in zip(*shapes)]

    def compare_outputs(self) -> None:
        common = self._run(self.chosen, ItemRecorder(self.call.device))
        names = names_of(common)
        if common.gathered:
            raise Refused(f"attribute {common.gathered[0]} gathers what it sees of the rows")
        if not names:
            raise Refused("the forward returns nothing that could be compared")
        if self.call.grad:
            self._weights = [random_weight(leaf) for leaf in common.outputs]
            self._go_back(common, self._weights)
            self._wanted = take_gradients(self.call.module)
        self._find_rounding(common)
        self._refuse_what_fails_alone(())
        axis = self.call.axis
        apart = self._run_shared(self.rules)
        whole, own = (tree_unflatten(list(run.outputs), run.treespec) for run in (common, apart))
        with torch.no_grad():
            parts = [part for (part,) in gathered([own], axis)]
        items = [
            stop - start
            for start, stop in (row_range(rank, axis.size, len(self.chosen)) for rank in (range(axis.size)))
        ]
        tolerance = max((self._tolerance_of(index) for index in range(len(common.outputs))), default=self._tolerance)
        self.rules = replace(self.rules, merge=find_merge(whole, parts, items, tolerance))
        together = self._run_shared(self.rules)
        if [_form(leaf) for leaf in together.outputs] != [_form(leaf) for leaf in common.outputs]:
            raise Refused("the results of workers do not go together")
        if what := without_meaning(common):
            raise Refused(f"{what}, which shows nothing about more of them")
        self._singles = [together]
        self.kinds = tuple(together.kinds)

    def may_lack(self) -> bool | None:
        """Returns whether an item that lacks what others have runs alone, through the same blocks; None without one."""
        lacking = [item for item in range(self._items.count) if self._items.lacks([item])]
        others = [item for item in range(self._items.count) if item not in lacking]
        if not lacking or not others:
            return None
        ways = []
        for item in (others[0], lacking[0]):
            with record_block_order(self.call.module) as way:
                recorder = ItemRecorder(self.call.device, counts=self._counts, leaves_out_statistics=True)
                if attempt(partial(self._forward, [item], recorder), self.call.module):
                    return False
            ways.append([name for name, _ in way])
        return ways[0] == ways[1]

    def _run_shared(self, rules: ItemRules) -> Any:
        call = self.call
        reduction = ItemReduction(
            call.device,
            axis=call.axis,
            rules=rules,
            draws_together=call.random.stream is not None,
            keeps_rows=False,
            mark=call.random.position(),
            meets_failed=call.meets_failed,
        )
        return self._run(self.chosen, reduction, mode="split", kinds=())

    def _find_rounding(self, common: Any) -> None:
        if "statistics" in self.saw:
            super()._find_rounding(common)
        else:
            self._output_rounding = [0.0] * len(common.outputs)
            self._gradient_rounding = dict.fromkeys(self._wanted, 0.0)

    def _refuse_what_fails_alone(self, lengths: Sequence[Tensor]) -> None:
        """Runs each worker's items without the others: an error in a shared run would leave those waiting for it."""
        call, axis = self.call, self.call.axis
        own = self.chosen[slice(*row_range(axis.rank, axis.size, len(self.chosen)))]
        recorder = ItemRecorder(call.device, counts=self._counts, leaves_out_statistics=True)
        with record_block_order(call.module) as way:
            reason = attempt(lambda: self._forward(own, recorder), call.module)
        found: list[Any] = [None] * axis.size
        dist.all_gather_object(found, (reason, [name for name, _ in way]), group=axis.group)
        if any(others for others, _ in found):
            raise Refused(next(others for others, _ in found if others))
        if any(others != found[0][1] for _, others in found):
            raise Refused(
                "which blocks an item goes through depends on it, and a plan that shards gathers a block once"
            )

    def _backward_apart(self) -> None:
        self._go_back(self._singles[0], self._weights)


def _form(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else type(leaf)

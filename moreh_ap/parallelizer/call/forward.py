"""Forward and backward of one call on this worker alone: the ordinary way.

Decides how a call's inputs, loss shares and gradients are treated so that all workers together compute what one device
would. Must not know the controller, messages, or what extensions of a call do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_flatten, tree_unflatten

from moreh_ap.errors import ExactnessError, UnsupportedError
from moreh_ap.parallelizer.call.call import GRADIENT_SYNCS, Call
from moreh_ap.parallelizer.call.execution import FREED, Execution, repeats_in
from moreh_ap.parallelizer.call.extension import Forward, extended, prepared
from moreh_ap.parallelizer.data.fsdp import calling, fsdp_roots, recover, settle
from moreh_ap.parallelizer.data.lent_rows import LentRows
from moreh_ap.parallelizer.data.row_gathering import GatheringReduction
from moreh_ap.parallelizer.items.item_reduction import ItemReduction
from moreh_ap.parallelizer.loss.loss_precision import Float32Losses
from moreh_ap.parallelizer.loss.loss_reduction import GlobalReduction
from moreh_ap.parallelizer.mesh import Axis
from moreh_ap.parallelizer.precision.output_precision import PROMISES, all_converted, shapes_of
from moreh_ap.parallelizer.rng.routed_rows import WorkerCounts
from moreh_ap.parallelizer.rng.turns import WorkerTurns
from moreh_ap.parallelizer.statistics.batch_parts import BatchParts
from moreh_ap.parallelizer.statistics.batch_statistics import JoinedReduction
from moreh_ap.parallelizer.surroundings.placement import OwnDevice
from moreh_ap.protocol.objects.returned_arguments import place_of
from moreh_ap.protocol.pytree import flatten
from moreh_ap.protocol.script_code.script_functions import behind_own_call


class EagerForward(Execution):
    """A forward that has run on this worker alone, and its backward.

    Args:
        call: What to run and how.
        args: Positional arguments, already this worker's rows in a split call.
        kwargs: Keyword arguments, likewise.
        reduction: What to do with mean losses, where it is not what the call's mode says.
        micro_batch: Which micro-batch of the worker's rows this is; decides its random numbers.
    """

    outputs: Sequence[Any] = ()
    _shares_history = False
    """Whether another execution may go backward through what led to the result, which a backward must not free then."""

    def __init__(
        self,
        call: Call,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        reduction: OwnDevice | None = None,
        micro_batch: int = 0,
    ) -> None:
        self.call = call
        leaves, spec = tree_flatten((tuple(args), dict(kwargs)))
        leaves = [_own_leaf(leaf, call.grad) for leaf in leaves]
        self.inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        means = reduction or reducing(call)
        args, kwargs = tree_unflatten(leaves, spec)
        if call.extensions:
            with torch.set_grad_enabled(call.grad):
                args, kwargs = prepared(call.extensions, call.module, args, kwargs)
        placed = call.placed if call.mode == "split" else None
        if placed is not None:
            args, kwargs = placed.take(args, kwargs, call.axis)
        if isinstance(means, GlobalReduction):
            args, kwargs = means.take(args, dict(kwargs))
        forward: Forward = self._run
        if call.extensions:
            forward = extended(call.extensions, self, call.module, forward)
        random = call.random if call.items is None else replace(call.random, worker=call.axis.rank)
        self.drawing = random.begin(call.device, micro_batch)
        draws = call.random.draws
        is_shared = (draws.host or draws.are_for_routed) and call.mode == "split" and call.axis.size > 1
        if is_shared and isinstance(means, GlobalReduction):
            self._draw_together(means)
        try:
            with torch.set_grad_enabled(call.grad), means, autocasting(call), self.drawing.forward():
                result = forward(args, kwargs)
                if isinstance(means, GlobalReduction):
                    result = means.finish(result, all_converted)
            self.drawing.end()
            if placed is not None:  # every worker's forward is through
                with torch.set_grad_enabled(call.grad):
                    result = placed.gather(result, self.attributes, all_converted, call.axis)
        except BaseException:
            recover(call.module)
            raise
        if not call.grad:
            settle(call.module)
        self.drew = self.drawing.moved()
        self._keep(result)
        if isinstance(means, GlobalReduction) and means.kinds is not None:
            self.kinds = means.kinds

    def _draw_together(self, means: GlobalReduction) -> None:
        """Has the workers exchange which random numbers they draw for their rows, in forwards that need to know."""
        call, draws = self.call, self.call.random.draws
        gathering = FSDPModule if fsdp_roots(call.module) else None
        if draws.are_for_routed:
            self.drawing.count_together(WorkerCounts(call.axis, means.is_common, call.device, gathering))
        if draws.host:
            turns = partial(WorkerTurns, call.axis, means.is_common, call.device)
            means.before_meeting = self.drawing.take_turns(turns, gathering)

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        result = _run(self.call, args, kwargs)
        if id(result) in map(id, (*args, *kwargs.values())):
            self.returned = place_of(result, args, kwargs)
        return result

    def _keep(self, result: Any) -> None:
        """Sets what is known of the result, whose history is kept for a backward."""
        self._results, self.treespec = flatten(result)
        if len({*map(id, self._results)}) < len(self._results):
            self.repeats = repeats_in(self._results)
        self._freed = False
        self._watched: Sequence[int] = ()
        self._output_gradients: dict[int, Tensor] = {}
        known = self.call.kinds
        self.kinds = (*known, *self.attribute_kinds) if known else ("same",) * len(self._results)
        if len(self.kinds) != len(self._results):
            self.kinds = kinds_in_order(self.kinds, self._results, self.call.gathering is not None)
        if "count" in self.kinds:
            self._results = summed_counts(self._results, self.kinds, self.call.axis)
        self.differentiable = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in self._results]
        self.outputs = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in self._results]
        promises = PROMISES in self.call.module.__dict__
        self.shapes = shapes_of(self._results, self.outputs) if promises else self.outputs

    def leaf(self, index: int) -> Any:
        return self._results[index]

    def kind(self, index: int) -> str:
        return self.kinds[index]

    def backward(self, output_grads: Sequence[Tensor | None], retain_graph: bool = False) -> list[Tensor | None]:
        with summing_gradients(self.call):
            return self.accumulate(output_grads, retain_graph)

    def accumulate(self, output_grads: Sequence[Tensor | None], retain_graph: bool = False) -> list[Tensor | None]:
        """Like `backward`, and leaves sums over workers to the caller."""
        roots, grads = [], []
        for index, result, grad in self.reached(output_grads):
            roots.append(result)
            grads.append(scaled_gradient(self.call, self.kinds[index], result, grad))
        if roots:
            if not any(grad is not None for grad in output_grads[: self.num_own]):
                self._refuse_to_enter_inside(roots)
            try:
                with self.drawing.backward(), self._watching() if self._watched else nullcontext():
                    torch.autograd.backward(roots, grads, retain_graph=retain_graph or self._shares_history)
            except BaseException:
                recover(self.call.module)
                raise
        if not retain_graph:
            self._freed = True
            self._results = [None] * len(self._results)
        return [self._take_gradient(leaf) for leaf in self.inputs]

    def reached(self, output_grads: Sequence[Tensor | None]) -> list[tuple[int, Tensor, Tensor]]:
        if self._freed:
            raise RuntimeError(FREED)
        return [
            (index, result, grad)
            for index, (result, grad) in enumerate(zip(self._results, output_grads, strict=True))
            if grad is not None and isinstance(result, Tensor) and result.requires_grad
        ]

    def _refuse_to_enter_inside(self, roots: Sequence[Tensor]) -> None:
        """FSDP2 gathers a block for its backward when a gradient comes to the block's output: a loss in an attribute
        (``self.last_loss``) may be computed from the model's output."""
        if fsdp_roots(self.call.module) and not come_to(roots, self._results[: self.num_own]):
            raise UnsupportedError(
                "backward() starts at tensors that hooks saw, or at attributes, and at no output of the model, which "
                "is sharded.",
                allowed="A loss with an output of the model in it, or a plan that does not shard.",
                fix=f'...(plan="replicate={self.call.axis.size}")',
            )

    def watch(self, leaves: Sequence[int]) -> None:
        self._watched, self._output_gradients = leaves, {}

    def output_gradient(self, leaf: int) -> Tensor | None:
        return self._output_gradients.get(leaf)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Keeps, during a backward, the gradients of the leaves that are watched."""

        def keep(index: int) -> Callable[[Tensor], None]:
            return lambda grad: self._output_gradients.update({index: grad.detach().clone()})

        leaves = [(index, self.leaf(index)) for index in self._watched]
        hooks = [leaf.register_hook(keep(index)) for index, leaf in leaves if leaf is not None and leaf.requires_grad]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _take_gradient(self, leaf: Tensor) -> Tensor | None:
        grad, leaf.grad = leaf.grad, None
        return grad


def autocasting(call: Call) -> AbstractContextManager[Any]:
    """Returns `torch.autocast` as the script had it around the call, or what of it a plan in bfloat16 needs."""
    if call.autocast is not None:
        return torch.autocast(call.device.type, dtype=call.autocast)
    return Float32Losses() if PROMISES in call.module.__dict__ else nullcontext()


def reducing(call: Call) -> AbstractContextManager[Any]:
    """Returns what makes mean losses of a forward shares of the global mean, and CUDA devices this worker's."""
    if call.mode == "split" and call.axis.size > 1:
        draws = call.random.draws
        fingerprint = call.random.fingerprint() if draws.stream or draws.host else None
        if call.items is not None:
            return ItemReduction(
                call.device,
                axis=call.axis,
                rules=call.items,
                draws_together=call.random.stream is not None,
                mark=call.random.position(),
                meets_failed=call.meets_failed,
            )
        if call.gathering is not None:
            return GatheringReduction(
                call.device,
                axis=call.axis,
                gathering=call.gathering,
                rules=call.rules,
                mark=fingerprint,
                meets_failed=call.meets_failed,
            )
        kind: Callable[..., GlobalReduction] = JoinedReduction if call.joined else GlobalReduction
        if call.lacks_rows:
            kind = partial(LentRows, kinds=call.kinds or ())
        if call.parts:
            kind = partial(JoinedReduction, parts=BatchParts(call.parts, call.module))
        return kind(
            call.device,
            axis=call.axis,
            rules=call.rules,
            meets=call.means or fingerprint is not None,
            mark=fingerprint,
            meets_failed=call.meets_failed and not call.joined,
        )
    return OwnDevice(call.device) if call.device.type == "cpu" else nullcontext()


@contextmanager
def summing_gradients(call: Call) -> Iterator[None]:
    """Inside, what a backward adds to gradients is summed over the workers."""
    with ExitStack() as active:
        for sync in call.module.__dict__.get(GRADIENT_SYNCS, ()):
            active.enter_context(sync.sync())
        yield


def scaled_gradient(call: Call, kind: str, result: Tensor, grad: Tensor) -> Tensor:
    """Returns the gradient of a leaf of the result as backward wants it. See [Note: kinds] in `call.py`."""
    if call.mode == "unsplit":
        return (grad if call.axis.rank == 0 else torch.zeros_like(grad)).to(result.dtype)
    counts_once = call.kinds is not None and kind == "same"
    return (grad * (1.0 / call.axis.size) if counts_once else grad).to(result.dtype)


def come_to(roots: Sequence[Tensor], outputs: Sequence[Any]) -> bool:
    """Says whether gradients of some tensors reach parameters only by way of outputs."""
    ends = {leaf.grad_fn for leaf in outputs if isinstance(leaf, Tensor) and leaf.grad_fn is not None}
    waiting, seen = [root.grad_fn for root in roots], set[Any]()
    while waiting:
        node = waiting.pop()
        if node in ends or node in seen:
            continue
        if node is None or hasattr(node, "variable"):  # a leaf
            return False
        seen.add(node)
        waiting += [following for following, _ in node.next_functions if following is not None]
    return bool(ends)


def _own_leaf(leaf: Any, grad: bool) -> Any:
    """Returns the leaf, cut off from whatever computed it."""
    if not isinstance(leaf, Tensor) or isinstance(leaf, nn.Parameter):
        return leaf
    return leaf.detach().requires_grad_(grad and leaf.requires_grad)


def _run(call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    run = call.module if call.target is None else call.target
    if isinstance(run, nn.Module) and type(run).__call__ is not nn.Module.__call__:
        run = behind_own_call(run)
    return (run if call.target is None else calling(call.module, run))(*args, **kwargs)


def kinds_in_order(known: Sequence[str], leaves: Sequence[Any], is_gathered: bool) -> tuple[str, ...]:
    """Returns the kinds of a result that has more or fewer leaves than before: the tags of sequences, of which each
    has as many as it has words, or the caches of those layers that were not dropped.

    Args:
        known: The kinds of the leaves that there were before.
        leaves: Those of now.
        is_gathered: Whether rows that the forward makes numbers of were gathered, so that every worker has those of
            all rows.

    Raises:
        ExactnessError: Which leaf is of which kind is not clear.
    """
    of_tensors = [kind for kind in known if kind in ("rows", "share", "same")]
    others = set(known) - {"const", *of_tensors}
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    first = of_tensors.index("rows") if "rows" in of_tensors else len(of_tensors)
    behind_losses = of_tensors[first:]
    # Caches keep whether they were filled. Lists with an entry for each row were refused when the forward was tried.
    only_flags = all(leaf is None or isinstance(leaf, (bool, Tensor)) for leaf in leaves)
    has_list_of_rows = len(behind_losses) > 1 and set(behind_losses) == {"rows"} and not others and only_flags
    are_alike = [leaf.ndim > 0 for leaf in tensors] == [at >= first for at in range(max(len(tensors), first + 1))]
    if has_list_of_rows and are_alike:
        before_rows = iter(of_tensors[:first])
        return tuple(next(before_rows, "rows") if isinstance(leaf, Tensor) else "const" for leaf in leaves)
    if not is_gathered or others or len(of_tensors) != len(tensors):
        raise ExactnessError(
            f"A forward returns {len(leaves)} values, and returned {len(known)} before.",
            "results with as many values in every call of a kind",
            "return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)  # in place of lists",
        )
    kinds = iter(of_tensors)
    return tuple(next(kinds) if isinstance(leaf, Tensor) else "const" for leaf in leaves)


def summed_counts(leaves: list[Any], kinds: Sequence[str], axis: Axis) -> list[Any]:
    """Returns the leaves of a result with whole numbers that are those of all rows. A collective."""
    places = [index for index, kind in enumerate(kinds) if kind == "count"]
    counts = torch.tensor([leaves[index] for index in places])
    dist.all_reduce(counts, group=axis.group)
    found = dict(zip(places, counts.tolist(), strict=True))
    return [found.get(index, leaf) for index, leaf in enumerate(leaves)]

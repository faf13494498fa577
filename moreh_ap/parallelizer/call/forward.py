"""Forward and backward of one call on one worker.

Decides how a call's inputs, random numbers, loss shares and gradients are treated so that all workers together compute
what one device would. Must not know the controller, messages, or where the batch came from.

[Note: split and whole]
"split": this worker has its rows of the batch; mean losses are shares of the global mean (`reduction.py`); its
random numbers are its part of the batch's (`draws.py`), or, without a common stream, its own. "whole": every worker has
the whole batch and the same random numbers and computes the same; since gradients are summed over workers afterwards,
each counts for one part in `num_workers`.

[Note: kinds]
Each leaf of a result has a kind (`proof.py`): "rows", "share", "same" or "const". A "same" leaf of a split call is
computed by every worker, so its gradient too counts for one part in `num_workers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import get_rank, get_world_size, is_initialized
from torch.utils._pytree import tree_flatten, tree_unflatten

from moreh_ap.errors import UnsupportedError
from moreh_ap.parallelizer.call.parameter_writes import parameters_kept
from moreh_ap.parallelizer.call.placement import OwnDevice
from moreh_ap.parallelizer.data.bucketed_allreduce import gradient_sync_of
from moreh_ap.parallelizer.data.fsdp import fsdp_roots, recover, settle
from moreh_ap.parallelizer.data.global_rng import Draw, Share, SharedDraws
from moreh_ap.parallelizer.data.loss_reduction import GlobalReduction
from moreh_ap.parallelizer.data.unused_parameters import uneven_gradients_of
from moreh_ap.parallelizer.pipeline.streaming import streaming_of
from moreh_ap.protocol.hook_records import Report, Run, with_report
from moreh_ap.protocol.passed_state import set_attribute, split_kept
from moreh_ap.protocol.pytree import flatten
from moreh_ap.protocol.rng_state import mark_of_stream, set_state_of_host, state_of_host, state_of_stream


@dataclass(frozen=True)
class Call:
    """What to run and how; the same on every worker.

    Attributes:
        module: The module a plan was applied to.
        mode: "split" or "whole". See [Note: split and whole].
        device: This worker's device.
        grad: Whether a backward may follow.
        seed: Where the random numbers of the call start; None leaves the generators as they are.
        stream: The state of the one stream that all workers draw from, as `torch.get_rng_state` gives it. It comes
            before `seed`.
        host_stream: Where Python's random numbers and NumPy's start; None leaves them where they are.
        draws: What a split call draws from that stream (`draws.py`).
        share: The rows that this worker, or this piece of its rows, draws for.
        group: The workers that share the batch; None is the default group.
        autocast: Dtype of `torch.autocast` around the forward, None for none.
        kinds: The kind of every leaf of the result, where it is known. See [Note: kinds].
        attributes: Of attributes that the forward may answer, the kinds of their leaves; None if it may answer all.
        counts: Whether numbers of true elements are denominators. See [Note: counts] in `reduction.py`.
        means: Whether the forward takes means over the batch, where it is known. See [Note: workers meet] there.
        target: What to call instead of the module: one of its submodules or bound methods.
    """

    module: nn.Module
    mode: str
    device: torch.device
    grad: bool = True
    seed: int | None = None
    group: dist.ProcessGroup | None = None
    autocast: torch.dtype | None = None
    kinds: tuple[str, ...] | None = None
    counts: bool = False
    means: bool = True
    target: Callable[..., Any] | None = None
    stream: Tensor | None = None
    host_stream: bytes | None = None
    draws: tuple[Draw, ...] = ()
    share: Share | None = None
    attributes: Mapping[str, tuple[str, ...]] | None = None

    @property
    def num_workers(self) -> int:
        """Number of workers that share the batch."""
        return get_world_size(self.group) if is_initialized() else 1

    @property
    def rank(self) -> int:
        """This worker's place among those that share the batch."""
        return get_rank(self.group) if self.num_workers > 1 else 0

    def autocasting(self) -> AbstractContextManager[Any]:
        """Returns `torch.autocast` as the script had it around the call."""
        return nullcontext() if self.autocast is None else torch.autocast(self.device.type, dtype=self.autocast)

    def reduction(self) -> AbstractContextManager[Any]:
        """Returns what has to be active during a forward of this call."""
        if self.mode == "split" and self.num_workers > 1:
            mark = mark_of_stream if self.draws else None
            meets = self.means or mark is not None
            nobody_else = self.num_workers == get_world_size() and not fsdp_roots(self.module)
            return GlobalReduction(
                self.device,
                group=self.group,
                counts=self.counts,
                meets=meets,
                mark=mark,
                meets_failed=nobody_else,
            )
        return OwnDevice(self.device) if self.device.type == "cpu" else nullcontext()

    def seed_generators(self, chunk: int = 0, stage: int = 0) -> None:
        """Starts the random numbers: own ones for each worker and chunk of a split call, equal ones otherwise.

        Each stage of a pipeline has own ones too; workers that split layers among them have equal ones.
        """
        if self.host_stream is not None:
            set_state_of_host(self.host_stream)
        if self.stream is not None:
            torch.default_generator.set_state(self.stream)
            return
        if self.seed is None:
            return
        rank = self.rank if self.mode == "split" else 0
        seed = (self.seed + 0x9E3779B9 * rank + 0x85EBCA6B * chunk + 0xC2B2AE35 * stage) % 2**63
        # Not `torch.manual_seed`: it also asks every back end that is not there, which takes longer than a small step.
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def shared_draws(self) -> SharedDraws | None:
        """Returns what draws this worker's part of the batch's random numbers in one `ForwardPass`."""
        if self.stream is None or self.share is None:
            return None
        return SharedDraws(self.draws, self.share)

    def gradient_scale(self, leaf: int) -> float:
        """Returns by what the gradient of a leaf of the result is multiplied. See [Note: kinds]."""
        counts_once = self.mode == "whole" or (self.kinds is not None and self.kinds[leaf] == "same")
        return 1.0 / self.num_workers if counts_once else 1.0

    def output_gradient(self, leaf: int, result: Tensor, grad: Tensor) -> Tensor:
        """Returns the gradient of a leaf of the result as backward wants it."""
        return grad.to(result.dtype) * self.gradient_scale(leaf)

    @contextmanager
    def gradient_sync(self) -> Iterator[None]:
        """What has to be active during backward so that gradients are summed over the workers."""
        with ExitStack() as active:
            for sync in (gradient_sync_of(self.module), uneven_gradients_of(self.module)):
                if sync is not None:
                    active.enter_context(sync.sync())
            yield


class ForwardPass:
    """A forward that has run on this worker alone, and its backward.

    Args:
        call: What to run and how.
        args: Positional arguments, already this worker's rows in a split call.
        kwargs: Keyword arguments, likewise.
        reduction: What to do with mean losses, where it is not what the call's mode says.
        chunk: Which piece of the worker's rows this is; decides its random numbers.

    Attributes:
        outputs: Leaves of the result, tensors without their history; this worker's rows of what has rows.
        differentiable: For each leaf whether a gradient may be given to `backward`.
        treespec: How the leaves nest.
        inputs: The tensor leaves of the arguments that `backward` answers gradients for.
        attributes: How many leaves each attribute has that the forward set; they are the last ones of `outputs`.
        left_out: Names of attributes that it set and that are not among them.
        gathered: Names of attributes, lists and the like, to which it added.
        drew: Whether anything was drawn from the CPU's stream or the host's, which stand behind it now.
        watched: Leaves of the result whose whole gradients the next `backward` keeps in `output_gradients`.
        output_gradients: What the last `backward` found for `watched`; nothing where nothing depends on the leaf.
    """

    attributes: Mapping[str, int] = MappingProxyType({})
    left_out: Sequence[str] = ()
    gathered: Sequence[str] = ()
    _num_own: int | None = None
    _shares_history = False
    """Whether somebody else may go backward through what led to the result, which a backward must not free then."""

    def __init__(
        self,
        call: Call,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        reduction: GlobalReduction | None = None,
        chunk: int = 0,
    ) -> None:
        self._call = call
        leaves, spec = tree_flatten((tuple(args), dict(kwargs)))
        leaves = [_own_leaf(leaf, call.grad) for leaf in leaves]
        self.inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        args, kwargs = tree_unflatten(leaves, spec)
        self._draws = call.shared_draws()
        call.seed_generators(chunk)
        streams = state_of_stream(), state_of_host()
        draws = self._draws or nullcontext()
        try:
            with torch.set_grad_enabled(call.grad), reduction or call.reduction(), call.autocasting(), draws:
                result, self.left_out, self.gathered = _invoke(call, args, kwargs)
            if self._draws is not None:
                self._draws.end()
        except BaseException:
            recover(call.module)
            raise
        if not call.grad:
            settle(call.module)
        self.drew = streams != (state_of_stream(), state_of_host())
        if isinstance(result, Report):
            self.attributes = {name: len(flatten(value)[0]) for name, value in result.attributes.items()}
            self._num_own = len(flatten(result.result)[0])
        if call.kinds is not None and call.attributes is not None:
            kinds = (kind for name in self.attributes for kind in call.attributes[name])
            self._call = replace(call, kinds=(*call.kinds, *kinds))
        self._keep(result)

    def _keep(self, result: Any) -> None:
        """Sets what is known of the result, whose history is kept for a backward."""
        self._results, self.treespec = flatten(result)
        self._freed = False
        self.watched: Sequence[int] = ()
        self.output_gradients: dict[int, Tensor] = {}
        self.differentiable = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in self._results]
        self.outputs: list[Any] = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in self._results]

    has_result = True
    """Whether this worker has the outputs; in a pipeline some have none."""

    def leaf(self, index: int) -> Any:
        """Returns a leaf of the result with its history, None where that is gone."""
        return self._results[index]

    def kind(self, index: int) -> str:
        """Returns the kind of that leaf."""
        return self.kinds[index]

    @property
    def kinds(self) -> Sequence[str]:
        """The kind of every leaf of the result. See [Note: kinds]."""
        return self._call.kinds or ("same",) * len(self._results)

    @property
    def shapes(self) -> list[Any]:
        """Leaves of the result for their shapes and dtypes: here the result itself."""
        return self.outputs

    @property
    def computed(self) -> bool:
        """Whether `outputs` may be read without computing anything."""
        return True

    def materialize(self) -> list[Any]:
        """Returns `outputs`, which are there already."""
        return self.outputs

    def backward(self, output_grads: Sequence[Tensor | None], retain_graph: bool = False) -> list[Tensor | None]:
        """Adds to the parameters' gradients, summed over the workers, and returns those of `inputs`.

        Args:
            output_grads: One gradient or None for each leaf of `outputs`, of the shape the leaf has here.
            retain_graph: Whether another backward through the same forward may follow.

        Returns:
            For each of `inputs` its gradient (this worker's rows of it), None where nothing depends on it.
        """
        with self._call.gradient_sync():
            return self.accumulate(output_grads, retain_graph)

    def accumulate(self, output_grads: Sequence[Tensor | None], retain_graph: bool = False) -> list[Tensor | None]:
        """Like `backward`, and leaves sums over workers that GradientSync makes to the caller."""
        roots, grads = [], []
        for index, result, grad in self._reached(output_grads):
            roots.append(result)
            grads.append(self._call.output_gradient(index, result, grad))
        if roots:
            self._refuse_to_enter_inside(output_grads)
            try:
                with self._drawing_again(), self._watching():
                    torch.autograd.backward(roots, grads, retain_graph=retain_graph or self._shares_history)
            except BaseException:
                recover(self._call.module)
                raise
        if not retain_graph:
            self._freed = True
            self._results = [None] * len(self._results)
        return [self._take_gradient(leaf) for leaf in self.inputs]

    def differentiate(
        self, output_grads: Sequence[Tensor | None], wanted: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Returns the gradients of `wanted` with their history, None for those on which nothing depends.

        Args:
            output_grads: As for `backward`.
            wanted: Tensors from which the result was computed. See [Note: scales] in `gradient_pass.py`.
        """
        is_whole = self._call.mode == "whole"
        roots, grads = [], []
        for index, result, grad in self._reached(output_grads):
            roots.append(result)
            grads.append(grad.to(result.dtype) if is_whole else self._call.output_gradient(index, result, grad))
        leaves = [leaf for leaf in wanted if leaf is not None and leaf.requires_grad]
        if not roots or not leaves:
            return [None] * len(wanted)
        with self._drawing_again():
            found = iter(torch.autograd.grad(roots, leaves, grads, create_graph=True, allow_unused=True))
        return [next(found) if leaf is not None and leaf.requires_grad else None for leaf in wanted]

    def _reached(self, output_grads: Sequence[Tensor | None]) -> list[tuple[int, Tensor, Tensor]]:
        """Returns number, result with its history, and gradient of the leaves where a backward begins.

        Raises:
            RuntimeError: The history is gone.
        """
        if self._freed:
            raise RuntimeError(
                "Trying to backward through the graph a second time (or directly access saved tensors after they have "
                "already been freed). Specify retain_graph=True if you need to backward through the graph a second "
                "time."
            )
        return [
            (index, result, grad)
            for index, (result, grad) in enumerate(zip(self._results, output_grads, strict=True))
            if grad is not None and isinstance(result, Tensor) and result.requires_grad
        ]

    def _drawing_again(self) -> AbstractContextManager[Any]:
        """Returns what has to be active while blocks may be computed again, with the random numbers they had."""
        return nullcontext() if self._draws is None else self._draws.again()

    def _refuse_to_enter_inside(self, output_grads: Sequence[Tensor | None]) -> None:
        """FSDP2 gathers a block for its backward when a gradient comes to the block's output."""
        enters_at_end = any(grad is not None for grad in output_grads[: self._num_own])
        if not enters_at_end and fsdp_roots(self._call.module):
            raise UnsupportedError(
                "backward() starts at tensors that hooks saw, or at attributes, and at no output of the model, which "
                "is sharded or in bf16.",
                allowed="A loss with an output of the model in it, or a plan that does not shard, in float32.",
                fix=f'...(plan="replicate={self._call.num_workers}", mixed_precision=False)',
            )

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Keeps, during a backward, the gradients of the leaves that are watched."""
        self.output_gradients = {}
        scale = self._call.num_workers if self._call.mode == "whole" else 1  # see [Note: split and whole]

        def keep(index: int) -> Callable[[Tensor], None]:
            return lambda grad: self.output_gradients.update({index: grad.detach() * scale})

        leaves = [(index, self.leaf(index)) for index in self.watched]
        hooks = [leaf.register_hook(keep(index)) for index, leaf in leaves if leaf is not None and leaf.requires_grad]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _take_gradient(self, leaf: Tensor) -> Tensor | None:
        grad, leaf.grad = leaf.grad, None
        if grad is not None and self._call.mode == "whole":
            grad = grad * self._call.num_workers
        return grad


def _own_leaf(leaf: Any, grad: bool) -> Any:
    """Returns the leaf, cut off from whatever computed it."""
    if not isinstance(leaf, Tensor) or isinstance(leaf, nn.Parameter):
        return leaf
    return leaf.detach().requires_grad_(grad and leaf.requires_grad)


def _invoke(call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Run:
    """Runs the module, given attributes that earlier forwards have set."""
    kwargs, kept = split_kept(kwargs)
    for name, value in kept.items():
        set_attribute(call.module, name, value)
    with parameters_kept(call.module):
        done = with_report(call.module, lambda: _run(call, args, kwargs), call.attributes)
    if isinstance(done.result, Report) and done.result.ended_by is not None:
        recover(call.module)
    return done


def _run(call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    streaming = streaming_of(call.module)
    if streaming is not None:
        args, kwargs = streaming.cast_inputs((args, dict(kwargs)))
        with streaming.active():
            return streaming.cast_result((call.target or call.module)(*args, **kwargs))
    if call.target is None:
        return call.module(*args, **kwargs)
    if not fsdp_roots(call.module):
        return call.target(*args, **kwargs)
    with _forward_replaced(call.module, call.target):
        return call.module(*args, **kwargs)


@contextmanager
def _forward_replaced(module: nn.Module, target: Callable[..., Any]) -> Iterator[None]:
    """Calling `module` runs `target`, so that FSDP2's hooks on the module gather the parameters it owns itself."""
    own = module.__dict__.get("forward")
    object.__setattr__(module, "forward", target)
    try:
        yield
    finally:
        if own is None:
            del module.__dict__["forward"]
        else:
            object.__setattr__(module, "forward", own)

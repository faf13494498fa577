"""A worker's part of a model, and of each call of it: what to run, on which rows, and what to answer.

The mathematics is the parallelizer's; this module translates between messages and it.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_unflatten

from moreh_ap.errors import ExactnessError, UnsupportedError
from moreh_ap.integrations import transformers_worker
from moreh_ap.parallelizer.apply import Example, apply_plan
from moreh_ap.parallelizer.call.forward import Call, ForwardPass
from moreh_ap.parallelizer.call.micro_batches import DeferredForward
from moreh_ap.parallelizer.call.run_call import run_forward
from moreh_ap.parallelizer.call.split_check import SplitProof, find_reads, prove_split
from moreh_ap.parallelizer.data.fsdp import fsdp_roots, prepare, set_requires_grad, settle
from moreh_ap.parallelizer.data.global_rng import Share
from moreh_ap.parallelizer.data.loss_reduction import Diverged
from moreh_ap.parallelizer.mesh import build_mesh
from moreh_ap.parallelizer.state.loading import fill
from moreh_ap.parallelizer.state.state_shard import Held
from moreh_ap.parallelizer.state.tensor_layout import TensorLayout
from moreh_ap.plan import Plan
from moreh_ap.protocol.batch import carries_rows, row_range, slice_rows
from moreh_ap.protocol.dropout import draws_random_numbers
from moreh_ap.protocol.memory_format import KernelFormats, memory_order
from moreh_ap.protocol.messages.calls import DefineSignature, Forward, ReadsAttributes
from moreh_ap.protocol.messages.models import BuildModel, ExampleCall
from moreh_ap.protocol.messages.tensors import StateRef, TensorSlot
from moreh_ap.protocol.model_settings import Settings
from moreh_ap.protocol.module_attributes import Attributes, full_name, report_attributes
from moreh_ap.protocol.passed_state import split_kept
from moreh_ap.protocol.process_flags import Flags, set_process_flags
from moreh_ap.protocol.pytree import unpickle_treespec
from moreh_ap.protocol.skeleton import unpickle_skeleton
from moreh_ap.runtime.worker.worker_call import InputRoles, WorkerCall
from moreh_ap.runtime.worker.worker_device import WorkerDevice

_COMPUTED_WHOLE = "Every device computes the whole batch"
_NOT_CUT = "The batch is not cut into micro-batches"
_DRAWN_APART = "Random numbers inside the model (dropout) are not those of one device: each device draws its own"


@dataclass(frozen=True)
class Moment:
    """What a script had set when it called a model: attributes that it changed, and training flags."""

    number: int
    values: dict[tuple[str, str], Any]
    training: bytes


class WorkerModel:
    """One model under its plan, this worker's part filled."""

    def __init__(self, command: BuildModel, device: WorkerDevice) -> None:
        self.device, self.plan = device, Plan.parse(command.plan)
        self.module = self._unpickle(command)
        self._meta_module = self._unpickle(command) if self.plan.micro_batches > 1 or self.plan.pipeline > 1 else None
        self._modules = list(self.module.modules())
        mesh = build_mesh(self.plan, device.torch_device.type)
        self.applied = apply_plan(self.module, self.plan, mesh, device.torch_device, self._example(command.example))
        fill(self.module, command.sources, device.torch_device, self.applied.layouts, self.applied.absent)
        prepare(self.module)
        # The objects stay the same from here on: FSDP2 puts others in their place only during a call.
        self.settle()
        self._parameters = dict(self.module.named_parameters())
        self._drops = draws_random_numbers(self.module)
        self._gradients_aside: dict[str, Tensor | None] | None = None
        self._proofs: dict[Any, SplitProof] = {}
        self._settings = Settings()  # a changed attribute may couple the rows
        self._kernel_formats = KernelFormats(self.module)
        self._values: dict[tuple[str, str], Any] = {}
        self._originals: dict[tuple[str, str], Any] = {}
        # A part of a model, or of its rows, sets a part of what one device would find: then it is only noticed.
        self._kept: set[str] = set()  # attributes that forwards have set
        self._found_reads: dict[Any, tuple[str, ...]] = {}
        self._unseen: Attributes | None = None
        if self.plan.tensor == self.plan.pipeline == self.plan.micro_batches == 1:
            report_attributes(self.module)
        else:
            self._unseen = Attributes(self.module)
            self._marks = self._unseen.marks()

    def _unpickle(self, command: BuildModel) -> nn.Module:
        module = unpickle_skeleton(command.skeleton, self.device.torch_device)
        transformers_worker.complete_unpickled(module)
        for part in module.modules():
            if isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
                part.sparse = False  # FSDP2 sums dense gradients; optimizers that take both do the same with them
        return module

    def _example(self, call: ExampleCall | None) -> Example | None:
        if call is None or self._meta_module is None:
            return None
        nesting = _Nesting(call.pickled_treespec, call.pickled_constants)
        args, kwargs = nesting.fill([self.device.place(data) for data in call.tensors])
        return Example(self._meta_module, args, without_cache(self.module, kwargs))

    # -- settings and state ----------------------------------------------------------------------------------------

    def change(self, changes: tuple[tuple[str, str, bytes], ...]) -> None:
        """Set attributes of submodules; ``config.name`` reaches into a transformers config."""
        self._settings.set({(path, name): pickled for path, name, pickled in changes})
        for path, name, pickled in changes:
            holder, last = _holder_of(self.module, path, name)
            self._originals.setdefault((path, name), getattr(holder, last, None))
            self._values[path, name] = pickle.loads(pickled)
            self._set_attribute(path, name, self._values[path, name])
        if self._unseen is not None:  # what the script sets, no forward has set
            now = self._unseen.marks()
            names = {full_name(path, name) for path, name, _ in changes}
            self._marks.update((name, now[name]) for name in names & now.keys())

    def _changed_unseen(self) -> list[str]:
        """Attributes that forwards have set, since the last time, and that are not answered with their results."""
        if self._unseen is None:
            return []
        changed = list(self._unseen.changed(self._marks))
        self._marks = self._unseen.marks()
        return changed

    def _set_attribute(self, path: str, name: str, value: Any) -> None:
        for root in (self.module, self._meta_module):
            if root is not None:
                holder, last = _holder_of(root, path, name)
                setattr(holder, last, value)

    def moment(self) -> Moment:
        """What is set now: what a call that is computed later has to be computed with."""
        return Moment(self._settings.number, dict(self._values), bytes(part.training for part in self._modules))

    @contextmanager
    def computing_later(self, moment: Moment) -> Iterator[None]:
        """Inside, if the plan computes a call again or only now, everything is set as it was then."""
        runs_later = self.plan.recompute != "none" or self.plan.micro_batches > 1 or self.plan.pipeline > 1
        now = self.moment() if runs_later else moment
        if (now.number, now.training) == (moment.number, moment.training):
            yield
            return
        self._set(moment)
        try:
            yield
        finally:
            self._set(now)

    def _set(self, moment: Moment) -> None:
        for (path, name), original in self._originals.items():
            self._set_attribute(path, name, moment.values.get((path, name), original))
        self.set_training(moment.training)

    def set_training(self, flags: bytes) -> None:
        """Set the training mode of each submodule, in the order of ``modules()``."""
        for module, flag in zip(self._modules, flags):
            module.training = bool(flag)

    def set_requires_grad(self, flags: dict[str, bool]) -> None:
        """Freeze or unfreeze parameters."""
        self._settings.set(flags)
        set_requires_grad(self.module, flags)

    def set_kernel_formats(self, formats: dict[str, torch.memory_format]) -> None:
        """Have convolutions return what they would if their kernels had these formats."""
        self._settings.set({(name, "memory_format"): format for name, format in formats.items()})
        self._kernel_formats.set(formats)

    def settle(self) -> None:
        """Have the parts of parameters in place before they are read or written outside a call."""
        settle(self.module)

    def placements(self) -> dict[str, str]:
        """For each parameter that is split or not everywhere, what tells where its parts are."""
        found = {}
        for name in self._parameters:
            held = self.parameter(name)
            if held is not None and (self.applied.layouts or self.applied.stages):
                stage = self.applied.stages.first_holder_of(name) if self.applied.stages else 0
                found[name] = f"stage {stage}, {held.layout or 'whole'}"
        return found

    def parameter(self, name: str) -> Held | None:
        """This worker's part of a parameter, as the optimizer sees it; None if it is on other stages only."""
        if name in self.applied.absent:
            return None
        return self._held(self._parameters[name], name)

    def _held(self, tensor: Tensor, name: str) -> Held:
        stages, position = self.applied.stages, self.applied.position
        is_first = stages is None or stages.first_holder_of(name) == position.pipeline.rank
        return Held(tensor, position, self.applied.layouts.get(name), is_first)

    def state(self, ref: StateRef) -> Held | None:
        """A parameter, a gradient or a buffer by its name; None if it is on other stages only.

        Raises:
            RuntimeError: If a gradient is read that is not there.
        """
        if ref.kind == "buffer":
            stages, position = self.applied.stages, self.applied.position
            is_first = stages is None or stages.holder_of_buffer(ref.name) == position.pipeline.rank
            return Held(self.module.get_buffer(ref.name), position, is_first=is_first)
        held = self.parameter(ref.name)
        if held is None or ref.kind == "param":
            return held
        if held.tensor.grad is None:
            raise RuntimeError(
                f"the gradient of {ref.name} was read, but it is None: no backward reached it since it was cleared"
            )
        return self._held(_alias(held.tensor.grad), ref.name)

    def set_gradient(self, name: str, whole: Tensor) -> None:
        """Replace a gradient by this worker's part of `whole`."""
        held = self.parameter(name)
        if held is None:
            return
        if held.tensor.grad is None:
            held.tensor.grad = torch.zeros_like(held.tensor)
        self._held(held.tensor.grad, name).write(whole)

    def has_gradient(self, name: str) -> bool:
        """Whether a parameter has a gradient here."""
        return self._parameters[name].grad is not None

    def clear_gradient(self, name: str) -> None:
        """Set a gradient to None."""
        self._parameters[name].grad = None

    def put_gradients_aside(self, aside: bool) -> None:
        """Keep the gradients for later, so that a backward finds none; or drop those there are for the kept ones."""
        if aside == (self._gradients_aside is not None):
            return
        self.settle()
        if self._gradients_aside is None:
            found = {name: parameter.grad for name, parameter in self._parameters.items()}
            self._gradients_aside = {name: None if grad is None else _alias(grad) for name, grad in found.items()}
            gradients: dict[str, Tensor | None] = dict.fromkeys(self._parameters)
        else:
            gradients, self._gradients_aside = self._gradients_aside, None
        for name, parameter in self._parameters.items():
            parameter.grad = gradients[name]

    def gradient_flags(self) -> bytes:
        """A byte for each parameter: whether it has a gradient here."""
        return bytes(parameter.grad is not None for parameter in self._parameters.values())

    # -- calls -----------------------------------------------------------------------------------------------------

    def forward(
        self, signature: DefineSignature, command: Forward, tensors: list[Tensor], local: list[bool]
    ) -> WorkerCall | ReadsAttributes:
        """Run the call on this worker's rows, or on the whole batch where it cannot be split; or ask for attributes."""
        if command.training is not None:
            self.set_training(command.training)
        set_process_flags(command.flags)
        module = self.module.get_submodule(signature.path)
        nesting = _Nesting(signature.pickled_treespec, signature.pickled_constants)
        rows = command.rows
        carried = [is_local or (rows is not None and carries_rows(t, rows)) for t, is_local in zip(tensors, local)]
        axis = self.applied.position.data if command.grad else self.applied.position.rows
        call = Call(
            self.module,
            "whole",
            self.device.torch_device,
            grad=command.grad,
            seed=command.seed,
            group=axis.group,
            autocast=command.autocast_dtype,
            target=None if module is self.module else module,
            stream=self._stream(command),
            host_stream=None if command.streams is None else command.streams.host,
        )
        kind = self._kind_of_call(call, signature, tensors, carried, command.flags)
        reads = self._reads((kind, frozenset(self._kept)), call, nesting, tensors, rows)
        if reads:
            return ReadsAttributes(reads)
        proof = self._proof(kind, call, nesting, tensors, rows)
        meta = None if self._meta_module is None else self._meta_module.get_submodule(signature.path)

        def run_as(proof: SplitProof) -> ForwardPass | DeferredForward:
            its_call, own = call, tensors
            if proof.split and rows is not None:
                start, stop = row_range(axis.rank, axis.size, rows)
                its_call = _split_call(call, proof, Share(start, stop, rows))
                parts = slice_rows(tensors, rows, start, stop)
                own = [whole if is_local else part for whole, part, is_local in zip(tensors, parts, local)]
            elif any(local):
                raise ExactnessError(
                    "an output of one model is an input of another, which every device computes whole",
                    "inputs that the script has read",
                    "x = x.detach().cpu().to(x.device)",
                )
            own = self._own_heads(nesting, own, local)
            wanted = zip(own, command.wants_grad)
            own = [tensor.detach().requires_grad_() if wants else tensor for tensor, wants in wanted]
            args, kwargs = self._arguments(its_call, nesting, own)
            return run_forward(its_call, args, kwargs, plan=self.plan, rows=rows, meta_module=meta)

        versions = [buffer._version for buffer in self.module.buffers()]
        try:
            run = run_as(proof)
        except Diverged as divergence:
            if versions != [buffer._version for buffer in self.module.buffers()]:
                raise ExactnessError(
                    f"{divergence}, and it changes buffers",
                    "such a forward without buffers that it changes",
                    "MOREH_NUM_DEVICES=1 python train.py",
                ) from divergence
            proof = SplitProof(False, (), f"{_COMPUTED_WHOLE}: {divergence}")
            run = run_as(proof)  # where the rows of one worker raised, this raises on all
            self._proofs[kind] = proof
        self._kept.update(run.attributes)
        left_out = [*run.left_out, *self._changed_unseen()]
        if self._draws_apart(call):
            proof = replace(proof, reason=". ".join(filter(None, (proof.reason, _DRAWN_APART))))
        roles = InputRoles(axis, rows, carried, command.wants_grad, command.expected)
        return WorkerCall(self, run, proof, roles, left_out)

    def _require_whole_parameters(self, name: str) -> None:
        """Refuse a forward that changes a parameter, where a worker has a part of it, or a forward runs twice."""
        plan, is_sharded = self.plan, bool(fsdp_roots(self.module))
        if is_sharded or plan.tensor > 1 or plan.pipeline > 1 or plan.recompute != "none":
            raise UnsupportedError(
                f"forward changes the parameter {name} itself, which plan={str(plan)!r} splits or computes twice.",
                allowed="Plans with replicate alone, in float32, for such a model.",
                fix=f'...(plan="replicate={plan.num_devices}", mixed_precision=False)',
            )

    def _draws_apart(self, call: Call) -> bool:
        """Whether the model drops something, and devices have masks that one device would not have."""
        if not (call.grad and self._drops()):
            return False
        is_shared = call.mode == "whole" or self.device.torch_device.type == "cpu"
        return self.applied.stages is not None or self.applied.tensor is not None or not is_shared

    def _stream(self, command: Forward) -> Tensor | None:
        """The one stream that all workers draw from; None for stages, which each draw from one of their own."""
        stream = None if command.streams is None else command.streams.torch
        if stream is None or (command.grad and self.applied.stages is not None):
            return None
        return torch.frombuffer(bytearray(stream), dtype=torch.uint8)

    def _own_heads(self, nesting: _Nesting, tensors: list[Tensor], local: list[bool]) -> list[Tensor]:
        """The tensors, those of a cache cut to the heads that this worker computes."""
        tensor = self.applied.tensor
        if tensor is None or tensor.cache_ranges is None:
            return tensors
        own = list(tensors)
        for index in nesting.cache_tensors():
            if not local[index] and tensors[index].dim() == 4:  # others are counts of positions
                own[index] = torch.cat([tensors[index][:, start:stop] for start, stop in tensor.cache_ranges], dim=1)
        return own

    def cache_layout(self, part: Tensor) -> TensorLayout | None:
        """What `part`, keys or values in a cache, is of those of all heads; None if it is all of them."""
        tensor = self.applied.tensor
        if tensor is None or tensor.cache_ranges is None or tensor.cache_heads is None or part.dim() != 4:
            return None
        shape = (part.shape[0], tensor.cache_heads, *part.shape[2:])
        return TensorLayout(shape, 1, tensor.cache_ranges, tensor.cache_writes)

    def _arguments(
        self, call: Call, nesting: _Nesting, tensors: list[Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = nesting.fill(tensors)
        keeps_no_cache = call.grad and (self.applied.stages is not None or self.plan.recompute != "none")
        return args, without_cache(self.module, kwargs) if keeps_no_cache else kwargs

    def _kind_of_call(
        self, call: Call, signature: DefineSignature, tensors: list[Tensor], carried: list[bool], flags: Flags
    ) -> tuple[Any, ...]:
        """What calls have in common of which the same is true."""
        kinds_of_input = tuple(
            (tensor.dim(), tensor.dtype, memory_order(tensor), rowed) for tensor, rowed in zip(tensors, carried)
        )
        training = bytes(module.training for module in self._modules)
        settings = (signature.path, signature.pickled_treespec, signature.pickled_constants, self._settings.number)
        return (settings, kinds_of_input, training, call.grad, call.autocast, flags)

    def _reads(
        self, kind: Any, call: Call, nesting: _Nesting, tensors: list[Tensor], rows: int | None
    ) -> tuple[str, ...]:
        """Which attributes a call reads that earlier ones have set, of those that it is not given."""
        if not self._kept:
            return ()
        if kind not in self._found_reads:
            args, kwargs = self._arguments(call, nesting, tensors)
            names = self._kept.difference(split_kept(kwargs)[1])
            self._found_reads[kind] = tuple(sorted(find_reads(call, args, kwargs, rows, names)))
        return self._found_reads[kind]

    def _proof(self, kind: Any, call: Call, nesting: _Nesting, tensors: list[Tensor], rows: int | None) -> SplitProof:
        """Whether calls like this one may be split; found out once for each kind of call."""
        workers, pieces = call.num_workers, self.plan.micro_batches if call.grad else 1
        if workers * pieces == 1 or rows is None or rows < workers:
            reason = f"{_COMPUTED_WHOLE}: the batch has fewer rows than there are devices" if workers > 1 else ""
            return SplitProof(False, (), reason)
        if kind not in self._proofs:
            args, kwargs = self._arguments(call, nesting, tensors)
            proof = prove_split(call, args, kwargs, rows)
            if proof.written:
                self._require_whole_parameters(proof.written)
            if not proof.split:
                what = _COMPUTED_WHOLE if workers > 1 else _NOT_CUT
                proof = replace(proof, reason=f"{what}: {proof.reason}")
            self._proofs[kind] = proof
        return self._proofs[kind]


def _split_call(call: Call, proof: SplitProof, share: Share) -> Call:
    """The call as it runs on a worker's share of the rows."""
    return replace(
        call,
        mode="split",
        kinds=proof.kinds,
        means=proof.means,
        counts=proof.counts,
        draws=proof.draws,
        share=share,
        attributes=proof.attributes,
    )


def _holder_of(root: nn.Module, path: str, name: str) -> tuple[Any, str]:
    """The object of which an attribute is set, and the attribute: ``config.name`` reaches into a configuration."""
    holder: Any = root.get_submodule(path)
    *through, last = name.split(".")
    for step in through:
        holder = getattr(holder, step)
    return holder, last


def _alias(gradient: Tensor) -> Tensor:
    """The same gradient as another tensor: memory that somebody holds is seen to be held, and is not used again."""
    return gradient.detach()


def without_cache(module: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments that keep a transformers model from filling a cache.

    In training nobody reads it. Stages of a pipeline would have different parts of it, and a block that is computed
    again would fill it twice: transformers switches it off too when it recomputes.
    """
    return {**kwargs, "use_cache": False} if _takes(module, "use_cache") else kwargs


def _takes(module: nn.Module, keyword: str) -> bool:
    """Whether `forward` has an argument of this name, or hands on whatever it gets to a part that has (PEFT does)."""
    parameters = inspect.signature(module.forward).parameters
    hands_on = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return keyword in parameters or (hands_on and any(_takes(part, keyword) for part in module.children()))


class _Nesting:
    """How the leaves of a call nest, with its constants in place."""

    def __init__(self, pickled_treespec: bytes, pickled_constants: bytes) -> None:
        self._constants: list[Any] = pickle.loads(pickled_constants)
        self._treespec: TreeSpec = unpickle_treespec(pickled_treespec)

    def cache_tensors(self) -> list[int]:
        """Which of the tensors that `fill` takes are keys and values in a cache."""
        slots = [leaf for leaf, value in enumerate(self._constants) if isinstance(value, TensorSlot)]
        in_cache = transformers_worker.cache_leaves(self._treespec)
        return [index for index, leaf in enumerate(slots) if leaf in in_cache]

    def fill(self, tensors: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments with `tensors` as the tensor leaves."""
        values = iter(tensors)
        leaves = [next(values) if isinstance(leaf, TensorSlot) else leaf for leaf in self._constants]
        args, kwargs = tree_unflatten(leaves, self._treespec)
        return args, kwargs

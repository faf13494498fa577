"""The commands that the controller sends to its workers, and what they answer.

Every command is a small frozen dataclass with explicit ids and no hidden state: the log of what was sent can be
replayed to a fresh worker. All workers receive the same commands in the same order. Tensors travel as bytes
(`TensorData`).
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from moreh_ap.parallelizer.memory_order import Order
    from moreh_ap.parallelizer.sources import TensorSource
    from moreh_ap.parallelizer.streams import Streams
    from moreh_ap.runtime.flags import Flags


MAX_INLINE_BYTES = 16 * 1024
"""A loss travels with the answer that announces it; logits stay on the workers until somebody reads them."""


class StateRef(NamedTuple):
    """Names a tensor that workers keep: ``("model0", "param", "head.weight")``, ``("optimizer0", "3", "exp_avg")``."""

    owner: str
    kind: str
    name: str


@dataclass(frozen=True)
class TensorData:
    """A whole tensor as bytes, in the order of memory. `on_device`: put it on the worker's device, not in host memory.

    What has no strides (a sparse tensor) is in PyTorch's own format.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    data: bytes
    on_device: bool = True

    @staticmethod
    def of(tensor: Tensor, on_device: bool = True) -> TensorData:
        """Encode a CPU tensor of any dtype, strides and layout."""
        if tensor.layout is not torch.strided:
            buffer = io.BytesIO()
            torch.save(tensor.detach(), buffer)
            return TensorData(tensor.dtype, tuple(tensor.shape), None, buffer.getvalue(), on_device)
        tensor = tensor.detach()
        dense = tensor if tensor.is_contiguous() else tensor.clone(memory_format=torch.preserve_format)
        flat = dense.as_strided((dense.numel(),), (1,))  # one element may have another stride
        data = flat.view(torch.uint8).numpy().tobytes()
        return TensorData(tensor.dtype, tuple(dense.shape), dense.stride(), data, on_device)

    def tensor(self) -> Tensor:
        """Decode into a CPU tensor that owns its memory."""
        if self.strides is None:
            loaded: Tensor = torch.load(io.BytesIO(self.data), weights_only=True)
            return loaded
        if not self.data:  # no elements: frombuffer refuses an empty buffer
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(bytearray(self.data), dtype=self.dtype).as_strided(self.shape, self.strides)


@dataclass(frozen=True)
class SavedTensor:
    """A whole tensor that lies in files, in boxes; each worker reads what it holds of it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    sources: tuple[TensorSource, ...]


@dataclass(frozen=True)
class OutputRef:
    """An output of an earlier call that was left on the workers, each holding its rows."""

    call_id: int
    index: int


@dataclass(frozen=True)
class PartRef:
    """A large tensor of which each worker holds its rows, or all."""

    number: int


@dataclass(frozen=True)
class RowsOf:
    """An operand that is whole, of which each worker takes its rows."""

    whole: TensorData | PartRef | OutputRef


@dataclass(frozen=True)
class NumRows:
    """A size that counts rows: `whole` over all workers, fewer on each."""

    whole: int


@dataclass(frozen=True)
class Expanded:
    """An operand that repeats a smaller tensor."""

    tensor: TensorData | RowsOf
    sizes: tuple[int | NumRows, ...]


@dataclass(frozen=True)
class Batch:
    """Several commands in one message, executed in order; answers the list of their results."""

    commands: tuple[Any, ...]


@dataclass(frozen=True)
class ImportModules:
    """Import modules that a model will need: a hint, while the controller is busy with something else."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class BuildModel:
    """Unpickle a skeleton on meta, apply the plan, and fill this worker's shards from files.

    `sources` maps names of parameters and buffers to the boxes that their values lie in. `example` is the call that a
    pipeline's cut is found with. Answers where the worker's parameters belong: parameters with one answer are laid out
    alike.
    """

    owner: str
    skeleton: bytes
    plan: str
    sources: dict[str, tuple[TensorSource, ...]]
    example: ExampleCall | None = None


@dataclass(frozen=True)
class ExampleCall:
    """A call of a model as a script makes it; constants and nesting as in `DefineSignature`."""

    pickled_treespec: bytes
    pickled_constants: bytes
    tensors: tuple[TensorData, ...]


@dataclass(frozen=True)
class ChangeModule:
    """Set attributes of submodules: ``(module path, attribute, pickled value)``; path "" is the root."""

    owner: str
    changes: tuple[tuple[str, str, bytes], ...]


@dataclass(frozen=True)
class SetRequiresGrad:
    """Freeze or unfreeze parameters."""

    owner: str
    requires_grad: dict[str, bool]


@dataclass(frozen=True)
class SetKernelFormats:
    """Say in which memory formats the script has the kernels of convolutions."""

    owner: str
    formats: dict[str, torch.memory_format]


class TensorSlot:
    """Stands for a tensor among the constant leaves of a call."""


@dataclass(frozen=True)
class DefineSignature:
    """Name the constant part of a call: where it goes, how its arguments nest, and its leaves that are not tensors.

    A `TensorSlot` among the pickled constants stands for each tensor.
    """

    signature: int
    owner: str
    path: str
    pickled_treespec: bytes
    pickled_constants: bytes


@dataclass(frozen=True)
class Forward:
    """Run a forward pass. `tensors` are the tensor leaves of the arguments in order; answers a `ForwardReply`.

    Random numbers go on from `streams`; those of PyTorch, where it has none for them, start at `seed`. The batch has
    `rows` rows: tensors that are named by an `OutputRef` do not tell, as a worker has some of them only. `flags` are
    those of the script's process. Where the controller does not wait for the answer, it counts on the mode `expected`.
    """

    call_id: int
    signature: int
    tensors: tuple[TensorData | OutputRef | StateRef, ...]
    rows: int | None
    wants_grad: tuple[bool, ...]
    grad: bool
    seed: int
    streams: Streams | None
    training: bytes | None
    autocast_dtype: torch.dtype | None
    flags: Flags
    expected: str | None = None


def bytes_of(tensor: Tensor) -> bytes:
    """The values of a tensor, its dims in the usual order."""
    return TensorData.of(tensor.cpu().contiguous()).data


@dataclass(frozen=True)
class LeafReply:
    """One leaf of a forward's result on one worker.

    kind: "rows" (concatenate over workers), "share" (sum over workers), "same" (equal everywhere), "const" (`data` is a
    pickled object). `data` is None where the tensor was left on the worker, of which operations may run there if
    `has_parts`; else it is in the usual order of dims, and `order` is the one that they have on the worker.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    differentiable: bool
    data: bytes | None
    has_parts: bool = False
    order: Order = ()

    def tensor(self) -> Tensor:
        """This worker's part as a CPU tensor; only for a tensor whose bytes were sent."""
        assert self.dtype is not None and self.data is not None
        if not self.data:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(bytearray(self.data), dtype=self.dtype).reshape(self.shape)


@dataclass(frozen=True)
class ForwardReply:
    """How a forward's result nests, its leaves, and how workers shared the batch; None from a worker without a result.

    mode: "split" (each has its rows of the outputs), "whole" (each has all), "stages" (the last stage has them).
    rows: How many rows of the batch the worker has; None if it has all.
    streams: Where random streams stand after the call; None if nothing was drawn from them.
    left_out: Attributes that the forward set and that are not among the leaves, such as ``encoder.cache``.
    """

    pickled_treespec: bytes
    leaves: tuple[LeafReply, ...]
    mode: str
    note: str
    rows: int | None = None
    streams: Streams | None = None
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReadsAttributes:
    """The answer to a `Forward` that has not run: it reads attributes that earlier ones set, and was not given them."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class ReadOutputs:
    """Answer outputs of a call: each worker its rows or share, the first alone what is the same everywhere.

    A worker without a result answers None.
    """

    call_id: int
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Backward:
    """Backpropagate through a call.

    Answers, a byte each, which parameters have a gradient now and which inputs that want one it has reached.

    `training` has the training flags if they are others than at the last call: a block that the model itself computes
    again is computed with those.
    separate: Parameters' gradients of before are put aside until `TakeGradients`, or until a backward that is not.
    watched: Leaves of the result whose gradients are kept for `ReadOutputGradient`.
    """

    call_id: int
    gradients: tuple[TensorData | PartRef | None, ...]
    retain_graph: bool
    training: bytes | None = None
    separate: bool = False
    watched: tuple[int, ...] = ()


@dataclass(frozen=True)
class Differentiate:
    """Backpropagate through call `of` so that its gradients can be differentiated again: they are a call of its own.

    Its arguments are the `gradients` that are there and the inputs of the other call; its results are the gradients of
    these inputs, then those of the outputs in `watched`, then those of `parameters`. Answers a `ForwardReply`.

    wants_grad: For each of the gradients, whether its own gradient is wanted.
    training: As in `Backward`.
    """

    call_id: int
    of: int
    gradients: tuple[TensorData | PartRef | None, ...]
    wants_grad: tuple[bool, ...]
    watched: tuple[int, ...]
    parameters: tuple[str, ...]
    training: bytes | None = None


@dataclass(frozen=True)
class TakeGradients:
    """Keep parameters' gradients of separate backward passes under other names; those of before are there again."""

    owner: str
    gradients: dict[str, StateRef]


@dataclass(frozen=True)
class ReadOutputGradient:
    """Answer the gradient that a backward left for a watched output: each worker its rows or share, or None."""

    call_id: int
    index: int


@dataclass(frozen=True)
class ReadInputGradients:
    """Answer the gradients that a backward left for the tensor inputs of a call."""

    call_id: int
    index: int


@dataclass(frozen=True)
class ReleaseCalls:
    """Forget what was kept of these calls."""

    call_ids: tuple[int, ...]


@dataclass(frozen=True)
class ReleaseState:
    """Forget temporary tensors."""

    refs: tuple[StateRef, ...]


@dataclass(frozen=True)
class ReleaseModel:
    """Forget a model with its parameters and calls."""

    owner: str


@dataclass(frozen=True)
class ReadState:
    """Answer whole tensors: one worker sends each, the others None in its place."""

    refs: tuple[StateRef, ...]


@dataclass(frozen=True)
class WriteState:
    """Set whole tensors; each worker keeps its part."""

    values: dict[StateRef, TensorData]


@dataclass(frozen=True)
class ReadCheckpoint:
    """Set state tensors to values that lie in files; each worker reads its part."""

    values: dict[StateRef, SavedTensor]


@dataclass(frozen=True)
class WriteCheckpoint:
    """Write state tensors, by their names in the checkpoint, into a file for each worker.

    Its path is ``{path}{rank}.safetensors``. Answers a `WrittenFile`, None if nothing of them counts on this worker.
    """

    path: str
    tensors: dict[str, StateRef]


@dataclass(frozen=True)
class CheckFiles:
    """Compare files with their sizes in bytes and checksums, every worker some of them: ``(path, size, sha256)``.

    Answers ``{path: what is wrong}``, of the files that this worker looked at.
    """

    files: tuple[tuple[str, int, str | None], ...]


@dataclass(frozen=True)
class KeepState:
    """Keep a state tensor under a temporary name too."""

    ref: StateRef
    output: StateRef


@dataclass(frozen=True)
class DefineList:
    """Give a list of state tensors a number: later commands name the list by it."""

    list_id: int
    refs: tuple[StateRef, ...]


@dataclass(frozen=True)
class ClearGradients:
    """Set gradients to None."""

    gradients: int


@dataclass(frozen=True)
class RunOperation:
    """Run an ATen operation on state tensors, each worker on its part; results are kept under `outputs`.

    `func` names the operator and its overload (``add_.Tensor``); in the arguments a StateRef stands for each tensor.
    """

    func: str
    arguments: Any
    keyword_arguments: Any
    outputs: tuple[StateRef, ...]


@dataclass(frozen=True)
class RunOnParts:
    """Run an ATen operation on parts of large tensors; results are kept under the numbers in `outputs`.

    In the arguments stand `PartRef`, `OutputRef`, `RowsOf`, `Expanded`, `NumRows` and `TensorData`. With `sums` results
    are summed over the workers that share the batch, and whole after that. Answers a `LeafReply` for each result that
    is whole and small, None for others; None in all from a worker that does not speak.
    """

    func: str
    arguments: Any
    keyword_arguments: Any
    outputs: tuple[int, ...]
    sums: bool


@dataclass(frozen=True)
class ReadPart:
    """Answer a `LeafReply` with this worker's part of a tensor; None from a worker that does not speak."""

    number: int


@dataclass(frozen=True)
class WritePart:
    """Set a tensor of which workers hold parts."""

    number: int
    whole: TensorData


@dataclass(frozen=True)
class ReleaseParts:
    """Forget these tensors."""

    numbers: tuple[int, ...]


@dataclass(frozen=True)
class BuildOptimizer:
    """Make an optimizer over parameters that live on the workers."""

    owner: str
    pickled_class: bytes
    groups: tuple[tuple[StateRef, ...], ...]
    defaults: dict[str, Any]


@dataclass(frozen=True)
class StepOptimizer:
    """One optimizer step. `changes` are hyper-parameters that differ from the last step: ``{group: {name: value}}``."""

    owner: str
    changes: dict[int, dict[str, Any]]


@dataclass(frozen=True)
class DescribeOptimizer:
    """Answer ``{parameter index: {key: entry}}``: a meta tensor for what is shaped like the parameter, or a value."""

    owner: str


@dataclass(frozen=True)
class LoadOptimizer:
    """Replace an optimizer's state: ``{parameter index: {key: TensorData, SavedTensor or a plain value}}``."""

    owner: str
    state: dict[int, dict[str, Any]]


@dataclass(frozen=True)
class GradientNorm:
    """Keep the common norm of some tensors under `output`."""

    tensors: int
    norm_type: float
    output: StateRef


@dataclass(frozen=True)
class ClipGradients:
    """Scale tensors so that a common norm of `total_norm` becomes at most `max_norm`."""

    tensors: int
    max_norm: float
    total_norm: StateRef


@dataclass(frozen=True)
class DescribeDevice:
    """Answer a `DeviceInfo`."""


@dataclass(frozen=True)
class DeviceInfo:
    """One worker's device.

    Attributes:
        name: Its name; "CPU" for a worker without one.
        memory_bytes: What it may use in all; a CPU worker's share of the machine.
        native_bf16: Whether it computes bfloat16 in hardware.
        num_threads: Threads that compute in a CPU worker; 0 elsewhere.
        num_cores: Cores that all CPU workers of the machine have together; 0 elsewhere.
    """

    name: str
    memory_bytes: int
    native_bf16: bool
    num_threads: int = 0
    num_cores: int = 0


@dataclass(frozen=True)
class ProbeDevice:
    """Measure what devices and links do; answer `DeviceRates`. A collective.

    Attributes:
        bf16: Whether to measure products in bfloat16 too.
    """

    bf16: bool


@dataclass(frozen=True)
class DeviceRates:
    """What one worker measured while all others did the same.

    Seconds of computing are those of its processor: of a CPU worker only while it had a core.

    Attributes:
        products: Operations a second of products of tokens x width with width x width, as (precision, tokens, width,
            rate): both long, tokens short, width short.
        elementwise: Bytes that a block's elementwise operations move a second, forward and backward together, as
            (precision, bytes of the forward, rate).
        start_s: Seconds that an operation of a forward takes however small it is.
        rehearse_s: The same on tensors without values.
        update_bytes_per_s: Bytes that a step of AdamW moves a second.
        exchanges: (kind, members, bytes of the whole, seconds, seconds of this worker's processor): a "sum", "gather"
            or "scatter" of a flat tensor, a "message" to a neighbour, and what a layer on the tensor axis exchanges of
            a hidden state, forward and backward: "crossing_sum", and "crossing_split" with sequence parallelism. All
            groups of a size exchange at a time.
    """

    products: tuple[tuple[str, int, int, float], ...]
    elementwise: tuple[tuple[str, int, float], ...]
    start_s: float
    rehearse_s: float
    update_bytes_per_s: float
    exchanges: tuple[tuple[str, int, int, float, float], ...]


@dataclass(frozen=True)
class ReportSteps:
    """Answer a `StepReport`."""


@dataclass(frozen=True)
class StepReport:
    """What the last training steps of one worker took.

    Attributes:
        seconds: Of each of them, the latest last.
        peak_bytes: What the device's allocator held at most; on a CPU, resident memory since the worker's start.
    """

    seconds: tuple[float, ...]
    peak_bytes: int


@dataclass(frozen=True)
class ReportMemory:
    """Answer bytes of this worker's device: ``allocated``, ``peak``, ``free``, ``total``."""

    reset_peak: bool = False
    empty_cache: bool = False


@dataclass(frozen=True)
class Synchronize:
    """Answer when everything sent before is done."""

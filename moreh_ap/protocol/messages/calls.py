"""Calls of models on the workers: forward, backward and what is read of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from moreh_ap.protocol.messages.tensors import LeafReply, OutputRef, RowShardRef, StateRef, TensorData
from moreh_ap.protocol.objects.returned_arguments import Place
from moreh_ap.protocol.process_flags import Flags
from moreh_ap.protocol.rng_state import Streams


@dataclass(frozen=True)
class DefineSignature:
    """Name the constant part of a call: where it goes, how its arguments nest, and its leaves that are not tensors.

    The pickled constants have a `TensorSlot` in place of each tensor.
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

    def owned(self) -> Forward:
        """Returns the same with tensors whose bytes do not change (`TensorData.of`)."""
        for one in self.tensors:
            if isinstance(one, TensorData) and not isinstance(one.data, bytes):
                break
        else:
            return self
        tensors = tuple([one.owned() if isinstance(one, TensorData) else one for one in self.tensors])
        return replace(self, tensors=tensors)


UNSPLIT = "Every device computes the whole batch"
"""Beginning of the note of an unsplit call."""

FEWER_ROWS = "the batch has fewer rows than there are devices"
NO_ROWS = "no input is a tensor with rows"
SINGLE_ROW = "the input is a single row, without a dim of rows"
"""Ends of such notes where the batch has too few rows to be split."""


def why_too_few(rows: int | None) -> str:
    """Returns why a batch of so many rows, None where no input has any, is too small for the devices."""
    return NO_ROWS if rows is None else FEWER_ROWS


@dataclass(frozen=True)
class ForwardReply:
    """How a forward's result nests, its leaves, and how workers shared the batch; None from a worker without a result.

    mode: "split" (each has its rows of the outputs), "unsplit" (each has all), "stages" (the last stage has them).
    note: Why the batch is not split, or what else the user should know; may be empty.
    rows: How many rows of the batch the worker has; None if it has all.
    streams: The states of the random streams after the call; None if nothing was drawn from them.
    left_out: Attributes that the forward set and that are not among the leaves, such as ``encoder.cache``.
    returned: Which argument the forward returned, if any; see `returned_arguments.py`.
    warnings: What the script is warned of, each once: the workers did something that it does not see.
    faults: Tracebacks of errors that are ours, in trials of the forward; each once.
    varies: Whether the sizes of the result depend on the values of the arguments.
    """

    pickled_treespec: bytes
    leaves: tuple[LeafReply, ...]
    mode: str
    note: str
    rows: int | None = None
    streams: Streams | None = None
    left_out: tuple[str, ...] = ()
    returned: Place | None = None
    warnings: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    varies: bool = False


@dataclass(frozen=True)
class ReadsAttributes:
    """The answer to a `Forward` that has not run: it reads attributes that earlier ones set, and was not given them."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class KeepsLists:
    """The answer to a `Forward` that has not run: its lists have no entry for each row. See `listed_rows.py`."""


@dataclass(frozen=True)
class AddsMembers:
    """The answer to a `Forward` that was undone: it adds layers, buffers or hooks to the model."""

    names: tuple[str, ...]


NotRun = ReadsAttributes | AddsMembers | KeepsLists
"""The answers to a `Forward` that is to be sent in another way."""


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
    gradients: tuple[TensorData | RowShardRef | None, ...]
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
    gradients: tuple[TensorData | RowShardRef | None, ...]
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

"""The base class of all ways to execute a call: at once, in micro-batches, through stages, as gradients of another.

Decides what may be asked of a call that was run, or will be when its backward is. Must not know how any of it runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moreh_ap.errors import UnsupportedError
from moreh_ap.parallelizer.call.call import Call
from moreh_ap.parallelizer.call.extension import Findings
from moreh_ap.parallelizer.rng.policy import Drawing

FREED = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been "
    "freed). Specify retain_graph=True if you need to backward through the graph a second time."
)
"""PyTorch's own words."""


_NO_REPEATS: Mapping[int, int] = {}


def repeats_in(leaves: Sequence[Any]) -> Mapping[int, int]:
    """Returns, of the leaves of a result that are the same tensor as an earlier one, the places of both."""
    first: dict[int, int] = {}
    tensors = ((place, id(leaf)) for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    places = ((place, first.setdefault(identity, place)) for place, identity in tensors)
    return {place: before for place, before in places if before != place}


class Execution(Findings, ABC):
    """One call on this worker, from its forward to its last backward.

    Attributes:
        call: What runs and how.
        inputs: The tensor leaves of the arguments that `backward` answers gradients for.
        treespec: How the leaves of the result nest.
        shapes: The leaves for their shapes and promised dtypes; tensors may be on meta.
        kinds: The kind of every leaf. See [Note: kinds] in `call.py`.
        differentiable: For each leaf whether a gradient may be given to `backward`.
        repeats: Of the leaves that are the same tensor as an earlier one, the places of both.
        has_result: Whether this worker has the outputs; in a pipeline some workers have none.
        is_computed: Whether `outputs` may be read without computing anything.
        runs_in_stages: Whether workers share the call as stages of a pipeline.
        drew: Whether the call drew from the CPU's stream or the host's, whose positions are those after the whole call.
    """

    call: Call
    inputs: Sequence[Tensor] = ()
    treespec: Any = None
    shapes: Sequence[Any]
    kinds: Sequence[str]
    differentiable: Sequence[bool]
    repeats: Mapping[int, int] = _NO_REPEATS
    has_result: bool = True
    is_computed: bool = True
    runs_in_stages: bool = False
    drew: bool = False

    @property
    @abstractmethod
    def outputs(self) -> Sequence[Any]:
        """Leaves of the result, tensors without their history: this worker's rows of a leaf with rows.

        A large one may have another dtype than promised. See [Note: promised] in `output_precision.py`.
        """

    @abstractmethod
    def backward(self, output_grads: Sequence[Tensor | None], retain_graph: bool = False) -> list[Tensor | None]:
        """Adds to the parameters' gradients, summed over the workers, and returns those of `inputs`.

        Args:
            output_grads: One gradient or None for each leaf of `outputs`, of the shape that the leaf has here.
            retain_graph: Whether another backward through the same forward may follow.

        Returns:
            For each of `inputs` its gradient (this worker's rows of it), None where nothing depends on it.
        """

    # -- only of an execution that keeps the history of its result -----------------------------------------------------

    drawing: Drawing
    """The random numbers of the forward."""

    def watch(self, leaves: Sequence[int]) -> None:
        """Has the next `backward` keep the whole gradients of these leaves for `output_gradient`.

        Raises:
            UnsupportedError: There are such leaves, and the call runs in micro-batches or stages.
        """
        if leaves:
            raise UnsupportedError(
                "The gradient of an output was asked for (a hook, retain_grad, autograd.grad) of a call that runs in "
                "micro-batches or stages.",
                "plans without micro-batches and pipeline",
                'plan="replicate=2"',
            )

    def output_gradient(self, leaf: int) -> Tensor | None:
        """Returns what the last `backward` found for a watched leaf, None where nothing depends on it."""
        raise self._has_no_history()

    def leaf(self, index: int) -> Any:
        """Returns a leaf of the result with its history, None where that is gone."""
        raise self._has_no_history()

    def kind(self, index: int) -> str:
        """Returns the kind of that leaf."""
        raise self._has_no_history()

    def promised(self, index: int) -> torch.dtype:
        """Returns the dtype that the script gets of that leaf, a tensor, and of its gradient."""
        dtype: torch.dtype = self.shapes[index].dtype
        return dtype

    def reached(self, output_grads: Sequence[Tensor | None]) -> list[tuple[int, Tensor, Tensor]]:
        """Returns number, result with its history, and gradient of the leaves where a backward begins.

        Raises:
            RuntimeError: The history is gone.
        """
        raise self._has_no_history()

    def _has_no_history(self) -> UnsupportedError:
        return UnsupportedError(
            "The history of a result was asked for (create_graph=True) of a call that runs in micro-batches or stages.",
            "plans without micro-batches and pipeline",
            'plan="replicate=2"',
        )


class PastExecution(Execution):
    """The results of an execution after its backward: they can be read, and no further backward runs through them.

    Args:
        run: The execution, which has computed its outputs.
    """

    outputs: Sequence[Any] = ()

    def __init__(self, run: Execution) -> None:
        self.inputs, self.shapes, self.kinds = run.inputs, run.shapes, run.kinds
        self.differentiable, self.repeats = run.differentiable, run.repeats
        self.has_result, self.runs_in_stages, self.drew = run.has_result, run.runs_in_stages, run.drew
        self.outputs = [run.outputs[index] for index in range(len(run.outputs))]
        self._output_gradients: dict[int, Tensor] = vars(run).get("_output_gradients", {})

    def backward(self, output_grads: Sequence[Tensor | None], retain_graph: bool = False) -> list[Tensor | None]:
        """Raises the error of a graph that was freed.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(FREED)

    def watch(self, leaves: Sequence[int]) -> None:
        """Nothing is watched: the backward that follows raises."""

    def output_gradient(self, leaf: int) -> Tensor | None:
        """Returns what the last backward has left for a watched leaf."""
        return self._output_gradients.get(leaf)

    def kind(self, index: int) -> str:
        """Returns the kind of a leaf."""
        return self.kinds[index]

    def reached(self, output_grads: Sequence[Tensor | None]) -> list[tuple[int, Tensor, Tensor]]:
        """Raises the error of a graph that was freed.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(FREED)

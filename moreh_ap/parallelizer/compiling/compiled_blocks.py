"""Compiles the forwards of blocks with `torch.compile`, each as one graph, and runs as written what cannot be compiled.

Decides when compiled code runs, and says in the log once for each class of blocks why it does not. Must not know plans,
other axes of the mesh, or how blocks were found.

[Note: one graph, without surroundings]
Compiled code is called outside of the torch function modes of a forward, so that no Python runs for its operations and
its result does not depend on the modes. So no operation in it may be one that a mode would change. The graph of each
block is searched for such operations, and has to be whole (`fullgraph`): operations between two graphs would be in
neither. A graph that is right under one set of modes may be wrong under another, so split and unsplit calls have graphs
of their own.

[Note: trials run as written]
The split check runs a block on one and two rows, under modes that record its operations. Compiled, it would be compiled
for those sizes, and the modes would record nothing. So all trials of a call run inside `as_written`.

[Note: inside of hooks and recomputation]
The block's `forward` is replaced, not the block, as recomputation does (`data/recompute.py`). Of a block that computes
its activations again, the graph has PyTorch's `checkpoint` in it: were it around the graph, the second run could take
another graph than the first one did, with other activations. Run as written, such a block is recomputed as without a
compiler. FSDP2's hooks stay outside of the graph, and the parameters it gathers are inputs. Equal blocks share a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import _get_current_function_mode_stack

from moreh_ap.local import logger
from moreh_ap.parallelizer.compiling import compilers, graph_rules
from moreh_ap.parallelizer.compiling.chosen_blocks import unwrapped
from moreh_ap.parallelizer.compiling.traced_forwards import defined_forward, traced_forward
from moreh_ap.parallelizer.data.lent_rows import LentRows
from moreh_ap.parallelizer.data.recompute import RecomputedForward, function_modes
from moreh_ap.parallelizer.loss.loss_precision import Float32Losses
from moreh_ap.parallelizer.loss.loss_reduction import GlobalReduction
from moreh_ap.parallelizer.rng.shared_draws import SharedDraws
from moreh_ap.parallelizer.surroundings.placement import OwnDevice
from moreh_ap.protocol.messages.compile_requests import CompileRequest

_MORE_GRAPHS = 16
"""Graphs that one forward may have beside one for each block, which differ if their numbers do."""

_LOOKED_FOR_IN_GRAPHS = (OwnDevice, SharedDraws, Float32Losses)
"""Modes that change nothing in a graph whose operations were looked at."""

_as_written: ContextVar[bool] = ContextVar("as_written", default=False)


@contextmanager
def as_written() -> Iterator[None]:
    """Inside, blocks run uncompiled. See [Note: trials run as written]."""
    token = _as_written.set(True)
    try:
        yield
    finally:
        _as_written.reset(token)


def compile_blocks(
    blocks: Sequence[nn.Module],
    request: CompileRequest,
    device: torch.device,
    *,
    casts: bool = False,
    gathers: bool = False,
) -> None:
    """Has blocks run compiled, where they can. Applied after recomputation and before `fully_shard`.

    Args:
        blocks: This worker's blocks to compile.
        request: The options of the script.
        device: This worker's device.
        casts: Whether the blocks will compute in bfloat16, but for batch normalisations and losses.
        gathers: Whether FSDP2 will gather their parameters.
    """
    compilers.prepare(device, len(blocks) + _MORE_GRAPHS)
    missing = compilers.why_not(request, device)
    functions: dict[Hashable, _CompiledFunction] = {}
    said = _Said()
    for block in blocks:
        inner, forward = unwrapped(block), vars(block).get("forward")
        recomputed = forward if isinstance(forward, RecomputedForward) else None
        reason = missing or _why_not(block, inner, recomputed, casts and gathers)
        if reason:
            said.say(type(inner).__name__, reason)
            continue
        how = "none" if recomputed is None else "selective" if recomputed.selective else "full"
        key = defined_forward(inner), how
        if key not in functions:
            traced, name = traced_forward(inner, how), type(inner).__name__
            graphs = partial(_Graphs, traced, request, device, how == "selective", casts)
            functions[key] = _CompiledFunction(name, request, said, graphs)
        object.__setattr__(block, "forward", _CompiledForward(block, inner, functions[key]))


def use_compiled_blocks(module: nn.Module, is_on: bool) -> None:
    """Has the compiled blocks in a module run compiled, or as written although they were compiled."""
    for block in module.modules():
        forward = vars(block).get("forward")
        if isinstance(forward, _CompiledForward):
            forward.is_on = is_on


def _why_not(block: nn.Module, inner: nn.Module, recomputed: RecomputedForward | None, gathers: bool) -> str:
    """Returns why a block cannot be compiled whatever its graph is, as the end of a sentence; "" if it may be."""
    if gathers and any(isinstance(submodule, _BatchNorm) for submodule in inner.modules()):
        return "its batch normalisation stays in float32, and is gathered by itself"
    own = vars(inner).get("forward")
    if inner is block and recomputed is not None:
        own = recomputed.replaces
    return "" if own is None else "its forward was replaced"


class _CompiledForward:
    """A block's forward that runs compiled where it can.

    Args:
        block: The block.
        inner: The same, or what it wraps: the module whose class has the forward.
        compiled: The forward of all blocks of its class.
    """

    def __init__(self, block: nn.Module, inner: nn.Module, compiled: _CompiledFunction) -> None:
        self._inner, self._forward, self._compiled = inner, block.forward, compiled
        self.is_on = True
        self.__wrapped__ = block.forward  # for those who look at the signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = None if _as_written.get() or not self.is_on else self._compiled.under(_get_current_function_mode_stack())
        if run is None:
            return self._forward(*args, **kwargs)
        with function_modes(()):
            try:
                return run(self._inner, args, kwargs)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # of any class: the compiler has few of its own
                failure = error
        result = self._forward(*args, **kwargs)  # an error of the forward itself is raised here, as it is uncompiled
        self._compiled.give_up(run, failure)
        return result


class _CompiledFunction:
    """The forward of a class of blocks, with the graphs that were made of it.

    Args:
        name: The class.
        request: The options of the script.
        said: The log.
        graphs: Makes the graphs of a split call, given True, or of an unsplit call, given False.
    """

    def __init__(self, name: str, request: CompileRequest, said: _Said, graphs: Callable[[bool], _Graphs]) -> None:
        self._name, self._request, self._said = name, request, said
        self._whole: _Graphs | None = graphs(False)
        self._of_rows: _Graphs | None = graphs(True)

    def under(self, modes: Sequence[object]) -> _Graphs | None:
        """Returns what runs under such torch function modes; None for the forward as it is written."""
        graphs = self._whole
        for mode in modes:
            kind = type(mode)
            if isinstance(mode, GlobalReduction):
                mode.settle()
            if kind is GlobalReduction:
                graphs = self._of_rows
            elif kind not in _LOOKED_FOR_IN_GRAPHS:
                if isinstance(mode, GlobalReduction) and kind is not LentRows:
                    self._said.say(self._name, "rows of several workers meet in the forward")
                return None
        return graphs

    def give_up(self, graphs: _Graphs, error: Exception) -> None:
        """From now on blocks run as they are written where these graphs would.

        Raises:
            Exception: The error, if the script wants to know of blocks that cannot be compiled.
        """
        reason = compilers.reason_of(error)
        if self._request.fullgraph and not isinstance(compilers.cause_of(error), Meets):
            raise error
        if graphs is self._whole:
            self._whole = None
        else:
            self._of_rows = None
        self._said.say(self._name, reason)


class Meets(Exception):
    """A graph is no block's that can run without surroundings; the text says why."""


class _Graphs:
    """The graphs of a forward under one kind of modes.

    Args:
        function: The forward.
        request: The options of the script.
        device: This worker's device.
        keeps_results: Whether recomputation keeps results of single operations.
        casts: Whether losses are float32 where the block computes in bfloat16.
        is_split: Whether means over rows are shares of those over the rows of all workers.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        request: CompileRequest,
        device: torch.device,
        keeps_results: bool,
        casts: bool,
        is_split: bool,
    ) -> None:
        self._request, self._device = request, device
        self._is_split, self._keeps_results, self._casts = is_split, keeps_results, casts
        self._run = torch.compile(function, backend=self._compile, fullgraph=True, dynamic=request.dynamic)

    def __call__(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch.compiler.set_stance("default"):  # else what is compiled runs as written, see `process_flags.py`
            return self._run(block, *args, **kwargs)

    def _compile(self, graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        reason = graph_rules.rows_meet(graph) if self._is_split else ""
        if self._casts:
            reason = reason or graph_rules.is_raised(graph)
        if self._keeps_results:
            reason = reason or graph_rules.changes_in_place(graph)
        if self._device.type == "cpu":
            reason = reason or graph_rules.draws(graph) or graph_rules.names_cuda(graph)
        if reason:
            raise Meets(reason)
        return compilers.compile_graph(graph, inputs, self._request)


class _Said:
    """The log, in which each line comes once."""

    def __init__(self) -> None:
        self._lines: set[str] = set()

    def say(self, name: str, reason: str) -> None:
        """Logs why blocks of a class run uncompiled."""
        line = f"compile: {name} runs uncompiled: {reason}"
        if line not in self._lines:
            self._lines.add(line)
            logger.say(line)

"""Which rows of a batch a trial runs, and how results of single rows compare with those of several.

Decides the kind of a leaf, and when two tensors are equal but for rounding. Must not know how the rows were run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.backends import cuda, cudnn

from moreh_ap.parallelizer.call.call import Call
from moreh_ap.parallelizer.call.execution import Execution
from moreh_ap.parallelizer.data.fsdp import settle
from moreh_ap.parallelizer.precision.output_precision import PROMISES
from moreh_ap.parallelizer.rounding import TOLERANCE_BF16, TOLERANCE_FP32, TOLERANCE_TF32
from moreh_ap.parallelizer.state.loading import local_shard
from moreh_ap.parallelizer.tensor.split_tensor import SplitTensor
from moreh_ap.parallelizer.trial.dry_run import Refused
from moreh_ap.protocol.batch import carries_rows

_T = TypeVar("_T")

OUTPUT = "output"
"""With what the names of leaves begin that the forward returns."""

_MAX_COMPARED_PARAMETERS = 24
_MOST_CLASSES = 4096
"""Entries of a row that may be labels: more are a picture, or a text."""
_CLASS_DTYPES = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}


def tolerance_of(call: Call) -> float:
    """Returns the largest difference that rounding explains in what a call computes."""
    dtypes = {p.dtype for p in call.module.parameters()} | {call.autocast}
    if dtypes & {torch.bfloat16, torch.float16} or PROMISES in call.module.__dict__:
        return TOLERANCE_BF16
    return TOLERANCE_TF32 if call.device.type == "cuda" and rounds_to_tf32(call.module) else TOLERANCE_FP32


def rounds_to_tf32(module: nn.Module) -> bool:
    """Returns whether flags of PyTorch let a GPU compute a module's products of float32 in TF32."""
    try:
        if cuda.matmul.allow_tf32 or torch.get_float32_matmul_precision() != "highest":
            return True
    except RuntimeError:  # precision was set in two ways that contradict each other
        return True
    convolves = any(parameter.ndim > 2 for parameter in module.parameters())
    recurs = any(isinstance(one, nn.RNNBase) for one in module.modules())
    return bool(cudnn.allow_tf32) and (convolves or recurs)


def repeats(forward: Callable[[], Execution], common: Execution, tolerance: float) -> bool:
    """Says whether a second forward gives what the first one gave, and only puts others in place of what that kept.

    So do hooks that keep what layers return in a dict (``self.features[name] = output``). A dict that grows with every
    forward, sums in it, and results for which an earlier forward counts are no reason to split.
    """
    forward()
    again = forward()
    return not again.gathered and all(map(functools.partial(_alike, tolerance), again.outputs, common.outputs))


def _alike(tolerance: float, got: Any, want: Any) -> bool:
    if isinstance(got, Tensor) and isinstance(want, Tensor):
        return close(got, want, tolerance)
    return type(got) is type(want) and bool(got == want)


def check_denominators(common: Sequence[Tensor], singles: Sequence[Sequence[Tensor]]) -> None:
    for site, whole in enumerate(common):
        parts = [single[site].cpu() for single in singles]
        if any(part.shape != whole.shape for part in parts):
            raise Refused(f"how many numbers the forward counts at site {site} depends on the rows")
        summed, together = torch.stack(parts).sum(0), whole.cpu()
        if bool(((summed - together).abs() > 1e-9 * together.abs().clamp(min=1.0)).any()):
            raise Refused(
                f"mean {site} of the forward counts {together.tolist()} together but {summed.tolist()} row by row"
            )


def means_beside_rows(places: Mapping[int, int], common: Sequence[Tensor], single: Sequence[Tensor]) -> frozenset[int]:
    """Returns where means over dim 0 count as much in some of the rows as in all of them: dim 0 has no rows there.

    Args:
        places: The call site of each mean, by its number in the order of execution.
        common: What all rows together counted, one number a site.
        single: What some of them counted.
    """
    both = [(site, place) for site, place in places.items() if site < min(len(common), len(single))]
    return frozenset(place for site, place in both if float(common[site]) == float(single[site]))


def names_of(run: Execution) -> list[str]:
    """Returns what the leaves of a result are called in a refusal."""
    of_attributes = [f"attribute {name}" for name, number in run.attributes.items() for _ in range(number)]
    return [f"{OUTPUT} {index}" for index in range(len(run.outputs) - len(of_attributes))] + of_attributes


DEPEND = "rows depend on each other"


def kind_of(name: str, common: Any, singles: Sequence[Any], tolerance: float, alike: float | None = None) -> str:
    """Returns the kind of a leaf of the result. See [Note: method] in `split_check.py`.

    Args:
        name: What the leaf is called in a refusal.
        common: What all rows together give.
        singles: What some of them give each time.
        tolerance: Largest difference from what all rows give, relative to its largest entry.
        alike: The same of what some rows give and others, where every worker has the leaf; None: `tolerance`. Much
            rounding would hide that the means of two workers are not the mean of both.

    Raises:
        Refused: The leaf has none.
    """
    if not isinstance(common, Tensor):
        if any(type(s) is not type(common) for s in singles):
            raise Refused(f"{name} has another type for some rows")
        if all(_equal(s, common) for s in singles):
            return "const"
        if type(common) is int and name.startswith(OUTPUT) and sum(singles) == common:
            return "count"
        if isinstance(common, (str, bytes, int, float, complex, torch.dtype, torch.device)):
            raise Refused(f"{name} ({common!r}) differs from row to row")
        return "opaque"
    if _follows(common, singles) and close(torch.cat(list(map(local_shard, singles))), common, tolerance):
        return "rows"
    if all(s.shape == common.shape for s in singles):
        common, singles = local_shard(common), list(map(local_shard, singles))
        adds_up = common.dtype != torch.bool and close(sum(singles[1:], start=singles[0]), common, tolerance)
        same = all(close(s, common, tolerance) for s in singles)
        same = same and all(close(s, singles[0], tolerance if alike is None else alike) for s in singles)
        if same and not (adds_up and common.ndim == 0):
            return "same"
        if adds_up:
            return "share"
    raise Refused(f"{name} of shape {tuple(common.shape)} is not what its rows give one by one: {DEPEND}")


def _follows(common: Tensor, singles: Sequence[Any]) -> bool:
    """Says whether the shapes are those of equal slices along dim 0; a row may have several entries there."""
    if common.ndim == 0 or common.shape[0] % len(singles):
        return False
    return all(s.shape == (common.shape[0] // len(singles), *common.shape[1:]) for s in singles)


def _equal(left: Any, right: Any) -> bool:
    try:
        return bool(left is right or left == right)
    except (TypeError, ValueError, RuntimeError):
        return False


def is_unknown(leaf: Any) -> bool:
    """Says whether a result holds what a stage puts in place of values that it does not have."""
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and bool(local_shard(leaf).isnan().any())


def without_meaning(run: Execution) -> str:
    """Returns in words why what a few rows give compares with anything: losses of zero, or one that is no finite number
    (the mean of no rows), or no finite number at all; empty where it tells something."""
    own = run.outputs[: len(run.outputs) - sum(run.attributes.values())]
    leaves = [leaf for leaf in own if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel()]
    numbers = [local_shard(leaf) for leaf in leaves]
    if numbers and all(leaf.ndim == 0 and not leaf for leaf in numbers):
        return "the loss of a few rows is zero"
    if not numbers or run.runs_in_stages:  # another stage may have the results
        return ""
    are_finite = [bool(torch.isfinite(leaf).any()) for leaf in numbers]
    if not any(are_finite) or not all(one for one, leaf in zip(are_finite, numbers) if leaf.ndim == 0):
        return "what a few rows give is no finite number"
    return ""


def close(got: Tensor, wanted: Tensor, tolerance: float, noise: float = 0.0) -> bool:
    """Says whether all differences are within `tolerance` of the largest entry wanted, or within `noise`."""
    got, wanted = local_shard(got), local_shard(wanted)
    if got.shape != wanted.shape:
        return False
    if not wanted.is_floating_point():
        return torch.equal(got, wanted)
    if wanted.numel() == 0:
        return True
    got, wanted = got.float(), wanted.float()
    largest, difference = (torch.linalg.vector_norm(x, torch.inf) for x in (wanted, got - wanted))
    if torch.isfinite(largest) and torch.isfinite(difference):
        return bool(difference <= max(tolerance * float(largest), noise))
    finite = torch.isfinite(wanted)
    if not torch.equal(torch.isfinite(got), finite):
        return False
    if not finite.any():
        return True
    largest = wanted[finite].abs().max()
    return bool((got - wanted)[finite].abs().max() <= max(tolerance * float(largest), noise))


def random_weight(leaf: Any) -> Tensor | None:
    """Returns a gradient for an output, with another value for each entry; equal on every worker."""
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return None
    if leaf.ndim == 0:
        return torch.ones_like(leaf)
    if isinstance(leaf, SplitTensor):
        shard = random_weight(leaf.local_shard)
        assert shard is not None
        return SplitTensor(shard, leaf.shape[leaf.split_dim], leaf.split_dim, leaf.crossing)
    entries = torch.arange(leaf.numel(), device=leaf.device, dtype=torch.float32)
    return (torch.sin(entries) / max(1, leaf.numel()) ** 0.5).reshape(leaf.shape).to(leaf.dtype)


def gradients_of_part(
    kinds: Sequence[str], weights: Sequence[Tensor | None], position: int, number: int
) -> list[Tensor | None]:
    """Returns the gradients of the outputs of one run of several; each has as many rows.

    Args:
        kinds: Of what kind each output is.
        weights: The gradients of the outputs of all rows.
        position: Which run it is.
        number: How many runs there are.
    """
    gradients: list[Tensor | None] = []
    for kind, weight in zip(kinds, weights, strict=True):
        if weight is None or kind == "share":
            gradients.append(weight)
        elif kind == "rows":
            entries = weight.shape[0] // number
            gradients.append(weight.narrow(0, position * entries, entries))
        else:
            gradients.append(weight / number)
    return gradients


def choose_rows(leaves: Sequence[Any], rows: int, *, may_pad: bool = False) -> list[int]:
    """Returns the two rows that differ most in how much of them counts (padding), in rising order.

    A row of which no target counts (labels of -100 alone) says nothing about a loss and is chosen last. A third row is
    chosen where rows have classes: losses that compare a row with one of its own class and one of another (triplets)
    are zero for any two rows. Where a forward `may_pad` sequences to the longest, that of each leaf is chosen too.
    """
    filled, targets = torch.zeros(rows), torch.full((rows,), torch.inf)
    for leaf in leaves:
        if carries_rows(leaf, rows) and not (leaf.is_floating_point() or leaf.is_complex()):
            filled += (leaf > 0).reshape(rows, -1).sum(1).cpu()
            targets = torch.minimum(targets, (leaf >= 0).reshape(rows, -1).sum(1).cpu())
    order = [row for row in filled.argsort(stable=True).tolist() if targets[row] > 0]
    if len(order) < 2:
        order = filled.argsort(stable=True).tolist()
    chosen = [order[0], order[-1]]
    longest = _longest(leaves, rows) if may_pad else ()
    return sorted({*chosen, *longest, *_complete_classes(leaves, rows, chosen)})


def sort_by_class(leaves: Sequence[Tensor], chosen: Sequence[int]) -> list[int]:
    """Returns rows with those next to each other that have a class in common, or labels, whatever these are written as.

    Workers that all have the same classes would not show that a forward asks which ones the batch has. Classes are in
    the tensors in which fewer rows differ than there are. Rows in the order of their lengths stay in it, since a
    forward may pack them.

    Args:
        leaves: Tensors with a row of the batch for each entry of their first dim.
        chosen: Rows.
    """
    classes: list[list[tuple[float, ...]]] = []
    if any(map(_is_in_order, leaves)):
        return list(chosen)
    for leaf in leaves:
        if leaf[0].numel() <= _MOST_CLASSES and not leaf.is_complex():
            of_rows = [tuple(leaf[row].flatten().tolist()) for row in chosen]
            if 1 < len(set(of_rows)) < len(chosen):
                classes.append(of_rows)
    classes.sort(key=lambda of_rows: len(set(of_rows)))
    order = sorted(range(len(chosen)), key=lambda place: [of_rows[place] for of_rows in classes])
    return [chosen[place] for place in order]


def _is_in_order(leaf: Tensor) -> bool:
    """Returns whether rows have one whole number each, and come in the order of these."""
    if leaf.numel() != len(leaf) or leaf.dtype not in _CLASS_DTYPES:
        return False
    numbers = leaf.flatten().tolist()
    return len(set(numbers)) > 1 and numbers in (sorted(numbers), sorted(numbers, reverse=True))


def _longest(leaves: Sequence[Any], rows: int) -> list[int]:
    """Returns for each leaf of whole numbers the row with most in it: entries above zero, or of one number a row it."""
    whole = [leaf for leaf in leaves if carries_rows(leaf, rows) and leaf.dtype in _CLASS_DTYPES]
    return [int((leaf if leaf.ndim == 1 else (leaf > 0).reshape(rows, -1).sum(1)).argmax()) for leaf in whole]


def _complete_classes(leaves: Sequence[Any], rows: int, chosen: Sequence[int]) -> list[int]:
    """Returns a row with which `chosen` has two rows of one class and one of another, if there is one."""
    for leaf in leaves:
        if carries_rows(leaf, rows) and leaf.numel() == rows and leaf.dtype in _CLASS_DTYPES:
            classes = leaf.flatten().tolist()
            here = [classes[row] for row in chosen]
            for row, own in enumerate(classes):
                if row not in chosen and (own not in here if here[0] == here[1] else own in here):
                    return [row]
    return []


def some_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Returns trainable parameters whose gradients are compared, evenly chosen among all of them, by name."""
    parameters = module.named_parameters()
    # What a forward has computed and put among the parameters is no leaf, and keeps no gradient.
    trainable = {name: p for name, p in parameters if p.requires_grad and p.is_leaf and not p.is_meta}
    names = list(trainable)
    step = max(1, -(-len(names) // _MAX_COMPARED_PARAMETERS))
    return {name: trainable[name] for name in [*names[::step], *names[-1:]]}


def take_gradients(module: nn.Module) -> dict[str, Tensor | None]:
    """Returns this worker's shard of the gradients of some parameters, and clears all."""
    settle(module)
    found = {name: param.grad for name, param in some_parameters(module).items()}
    gradients = {name: None if grad is None else local_shard(grad).detach().clone() for name, grad in found.items()}
    for param in module.parameters():
        param.grad = None
    return gradients


def without_attributes(
    leaves: tuple[_T, ...], numbers: Mapping[str, int]
) -> tuple[tuple[_T, ...], dict[str, tuple[_T, ...]]]:
    """Returns what is known of the leaves of a result, and of each attribute's behind them."""
    of_attributes: dict[str, tuple[_T, ...]] = {}
    for name, number in reversed(list(numbers.items())):
        leaves, of_attributes[name] = leaves[: len(leaves) - number], leaves[len(leaves) - number :]
    return leaves, of_attributes


def gathered_kinds(kinds: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the kinds of a result whose rows are gathered at the end of the forward, as those of such a batch are."""
    return tuple("same" if kind == "rows" else kind for kind in kinds)


def group_sizes(rows: int, parts: int) -> list[int]:
    """Returns how many rows to run apart: one, and, should the forward not run on one, more: as many as divide what
    each of `parts` gets of a batch."""
    share, rest = divmod(rows, parts)
    return [1, *sorted(size for size in {2, 4, 8, share} if size > 1 and not rest and share and share % size == 0)]


def check_block_order(ways: Sequence[Sequence[tuple[str, Any]]]) -> None:
    """Compares in which order runs came to what FSDP2 gathers, that of all rows first.

    Raises:
        Refused: It depends on the rows, or with how much of them.
    """
    common, first, *others = ways
    if [name for name, _ in common] != [name for name, _ in first] or any(way != first for way in others):
        raise Refused(
            "which blocks a row goes through depends on the row, and a plan that shards gathers a block on all "
            "devices at once"
        )


def check_gradients(
    wanted: Mapping[str, Tensor | None],
    got_by_name: Mapping[str, Tensor | None],
    is_rounding: Callable[[str, Tensor, Tensor], bool],
) -> None:
    """Compares the gradients of parameters by their names: those of all rows, and the sums of those of rows apart.

    Raises:
        Refused: One is no sum, and the difference no rounding.
    """
    for (name, want), got in zip(wanted.items(), map(got_by_name.__getitem__, wanted), strict=True):
        if (got is None) != (want is None):
            raise Refused(f"whether {name} gets a gradient depends on the rows")
        if got is not None and want is not None and not is_rounding(name, got, want):
            raise Refused(f"the gradient of {name} is not the sum of what its rows give one by one")


def went_back(backward: Callable[[], object]) -> bool:
    """Runs a backward; returns False where the forward has gone back through the graph itself and kept none
    (`torch.autograd.grad`). So it is on one device, where a script does not go back either."""
    try:
        backward()
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        return False
    return True

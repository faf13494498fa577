"""The gradients of a call as a call of their own, for scripts that differentiate twice (`create_graph=True`).

Decides how workers share that call. What it computes is for the parallelizer's `gradient_pass.py` to know.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moreh_ap.parallelizer.call.execution import Execution
from moreh_ap.parallelizer.call.gradient_pass import GradientPass
from moreh_ap.parallelizer.call.roles import Roles

KIND_OF_GRADIENT = {"rows": "rows", "same": "share", "share": "same"}
"""An output that every worker computes alike is used by each for its rows; a share of a sum gets the sum's gradient."""


def differentiate(
    run: Execution,
    roles: Roles,
    output_grads: list[Tensor | None],
    wants_grad: Sequence[bool],
    watched: Sequence[int],
    parameters: Sequence[Tensor],
) -> tuple[Execution, Roles]:
    """Returns the gradients of a call, and how workers share them.

    Args:
        run: The call.
        roles: How workers share it.
        output_grads: For each leaf of its result this worker's share of the gradient, or None.
        wants_grad: For each tensor of the result whether the gradient of its gradient is wanted.
        watched: Leaves of the result whose gradients are wanted too.
        parameters: Parameters whose gradients are wanted too.

    Raises:
        UnsupportedError: The call runs in micro-batches or stages.
    """
    kinds, carried = run.kinds if roles.is_split else (), roles.carried
    wanted = [index for index, wants in enumerate(roles.wants_grad) if wants]
    result_kinds: list[str] = []
    if roles.is_split:
        result_kinds = ["rows" if carried[index] else "share" for index in wanted]
        result_kinds += [KIND_OF_GRADIENT[run.kind(index)] for index in watched]
        result_kinds += ["share"] * len(parameters)
    tensors = [index for index, shape in enumerate(run.shapes) if isinstance(shape, Tensor)]
    wants = dict(zip(tensors, wants_grad, strict=True))
    own = [None if grad is None else grad.detach().requires_grad_(wants[i]) for i, grad in enumerate(output_grads)]
    given = [index for index in tensors if own[index] is not None]
    gradient = GradientPass(run, own, tuple(result_kinds), watched, parameters)
    inputs = [bool(kinds) and kinds[index] == "rows" for index in given] + [carried[index] for index in wanted]
    wants_again = (*(wants[index] for index in given), *(True for _ in wanted))
    return gradient, Roles.of(roles.axis, roles.rows, inputs, wants_again, roles.is_split)

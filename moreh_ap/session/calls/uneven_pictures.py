"""Whether a tensor of pictures only looks like rows, found out before a call is sent.

Must not know what workers make of it. Nothing here waits for a value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moreh_ap.device.tensor import VirtualTensor
from moreh_ap.device.values import Here
from moreh_ap.protocol.objects.picture_rows import find_pictures


def are_no_rows(tensors: Sequence[Tensor]) -> bool:
    """Returns whether rows of tokens have as many pictures as there are rows, but not one each.

    Then the first dim of the pictures counts no rows, although it is as large. See `picture_rows.py`.
    """
    rows = {len(tensor) for tensor in tensors if tensor.ndim == 2 and not tensor.is_floating_point()}
    if not any(tensor.ndim > 2 and tensor.is_floating_point() and len(tensor) in rows for tensor in tensors):
        return False
    known = []
    for tensor in tensors:
        if tensor.is_floating_point():
            known.append(torch.empty(tensor.shape, device="meta"))
        elif not isinstance(tensor, VirtualTensor):
            known.append(tensor)
        elif isinstance(value := tensor._cell.settle(), Here):
            known.append(value.tensor)
    return find_pictures(tuple(known), {}) is not None

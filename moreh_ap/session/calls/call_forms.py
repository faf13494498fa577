"""What of a call's tensors decides which calls are alike, and whether they have rows, before the call is sent.

Must not know what workers make of it. Nothing here waits for a value.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from moreh_ap.device.tensor import VirtualTensor
from moreh_ap.device.values import Here
from moreh_ap.protocol.memory_format import memory_order
from moreh_ap.protocol.objects.picture_rows import find_pictures

_FORMS: dict[Hashable, Hashable] = {}
_MAX_FORMS = 4096


def form_of(tensor: Tensor) -> Hashable:
    """Returns shape, dtype and order of dims in memory."""
    if tensor.layout is not torch.strided:
        return tuple(tensor.shape), tensor.dtype, memory_order(tensor)
    form = (tensor.shape, tensor.dtype, tensor.stride())
    if form not in _FORMS:
        if len(_FORMS) >= _MAX_FORMS:
            _FORMS.clear()
        _FORMS[form] = (tuple(tensor.shape), tensor.dtype, memory_order(tensor))
    return _FORMS[form]


def have_uneven_pictures(tensors: Sequence[Tensor]) -> bool:
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

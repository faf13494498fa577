"""Lets torchvision of PyPI be imported beside a PyTorch without CUDA, and computes two of its operators in Python.

PyPI's torchvision is built for CUDA: beside a CPU build of PyTorch its library is not loaded, and importing it fails
since its operators are missing. Test environments import this module at their start (a `.pth` file names it); it does
nothing until torchvision is imported, and nothing where torchvision's own library is loaded.
"""

from __future__ import annotations

import importlib.abc
import sys

_UNUSED = (
    "_roi_align_backward", "roi_pool", "_roi_pool_backward", "ps_roi_align", "_ps_roi_align_backward", "ps_roi_pool",
    "_ps_roi_pool_backward", "deform_conv2d", "_deform_conv2d_backward", "qroi_align",
)  # fmt: skip
"""Operators for whose names torchvision registers shapes when it is imported."""

_library = None


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Defines the operators when torchvision is looked for, once, and leaves the finding to others."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname == "torchvision":
            import torch

            if torch.version.cuda is None:
                _define()
        elif fullname == "torchvision._meta_registrations":  # imported after the module that looks for its library
            sys.meta_path.remove(self)
            if _library is not None:
                sys.modules["torchvision.extension"]._has_ops = lambda: True


def _define() -> None:
    global _library
    import torch

    _library = library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define(
        "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
        "int sampling_ratio, bool aligned) -> Tensor"
    )
    for name in _UNUSED:
        library.define(f"{name}(Tensor input) -> Tensor")
    library.impl("nms", _nms, "CPU")
    library.impl("roi_align", _roi_align, "CompositeImplicitAutograd")


def _nms(boxes_N4, scores_N, iou_threshold):
    """Returns the indices of boxes that no better one overlaps by more than the threshold, the best first."""
    import torch

    areas_N = (boxes_N4[:, 2:] - boxes_N4[:, :2]).prod(dim=1)
    left, kept = scores_N.argsort(descending=True, stable=True), []
    while len(left):
        best, left = left[0], left[1:]
        kept.append(int(best))
        first_corner = torch.maximum(boxes_N4[best, :2], boxes_N4[left, :2])
        last_corner = torch.minimum(boxes_N4[best, 2:], boxes_N4[left, 2:])
        shared = (last_corner - first_corner).clamp(min=0).prod(dim=1)
        left = left[shared <= iou_threshold * (areas_N[best] + areas_N[left] - shared)]
    return torch.tensor(kept, dtype=torch.long)


def _roi_align(input, rois, spatial_scale, pooled_height, pooled_width, sampling_ratio, aligned):
    from torchvision.ops.roi_align import _roi_align as in_python

    return in_python(input, rois, spatial_scale, pooled_height, pooled_width, sampling_ratio, aligned)


if not any(isinstance(finder, _BeforeTorchvision) for finder in sys.meta_path):
    sys.meta_path.insert(0, _BeforeTorchvision())

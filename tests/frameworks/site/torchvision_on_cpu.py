"""Lets torchvision of PyPI be imported beside a PyTorch without CUDA, and computes `nms` in Python.

PyPI's torchvision is built for CUDA: beside a CPU build of PyTorch its library is not loaded, and importing it fails
since its operators are missing. It has `roi_align` in Python itself. Test environments import this module at their
start (a `.pth` file names it); it does nothing until torchvision is imported, and nothing where torchvision's own
library is loaded.
"""

from __future__ import annotations

import importlib.abc
import sys

_library = None


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Defines the operator when torchvision is looked for, once, and leaves the finding to others."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname == "torchvision":
            import torch

            if torch.version.cuda is None and _library is None:  # others look whether torchvision is there, without it
                _define()
        elif fullname == "torchvision._meta_registrations":  # imported after the module that looks for its library
            sys.meta_path.remove(self)
            if _library is not None:
                sys.modules["torchvision.extension"]._assert_has_ops = lambda: None


def _define() -> None:
    global _library
    import torch

    _library = library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.impl("nms", _nms, "CPU")


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


if not any(isinstance(finder, _BeforeTorchvision) for finder in sys.meta_path):
    sys.meta_path.insert(0, _BeforeTorchvision())

"""How the nesting of arguments and results (a pytree's spec) travels between controller and workers."""

from __future__ import annotations

import pickle
import warnings

import cloudpickle
from torch.utils._pytree import TreeSpec

from moreh_ap.parallelizer.containers import register_containers


def pickle_treespec(treespec: TreeSpec) -> bytes:
    """`treespec` as bytes; container classes defined in ``__main__`` travel by value."""
    data: bytes = cloudpickle.dumps(treespec)
    return data


def unpickle_treespec(data: bytes) -> TreeSpec:
    """The inverse of `pickle_treespec`."""
    with warnings.catch_warnings():
        # PyTorch's own pickle of a leaf asks for a class that it calls deprecated.
        warnings.simplefilter("ignore", FutureWarning)
        treespec: TreeSpec = pickle.loads(data)
        register_containers(treespec)
    return treespec

"""The wrapper that Accelerate puts around a forward travels while the one line is on, and is as before after it."""

from __future__ import annotations

import operator
import pickle

import pytest

from moreh_ap.integrations import accelerate
from moreh_ap.patching import Patches

operations = pytest.importorskip("accelerate.utils.operations")


def test_a_prepared_forward_is_pickled_until_that_is_undone():
    patches = Patches()
    accelerate.install(patches)
    wrapper = operations.ConvertOutputsToFp32(operator.neg)
    try:
        assert pickle.loads(pickle.dumps(wrapper))(3) == -3
    finally:
        patches.undo()
    with pytest.raises(pickle.PicklingError):
        pickle.dumps(wrapper)

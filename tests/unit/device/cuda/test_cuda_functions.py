"""`torch.cuda` of a script's process, without workers."""

from __future__ import annotations

import pytest
import torch

from moreh_ap.device.cuda import cuda_functions
from moreh_ap.errors import UnsupportedError
from moreh_ap.patching import Patches


def test_what_needs_a_context_in_the_script_s_process_is_refused():
    patches = Patches()
    cuda_functions.install(patches, None)
    try:
        with pytest.raises(UnsupportedError, match="the devices belong to the workers") as error:
            torch.cuda.current_blas_handle()
        assert [line.partition(":")[0] for line in str(error.value).splitlines()[1:]] == ["Allowed", "Try", "See"]
        assert torch.cuda.is_initialized() and torch.cuda.device_count() == 1
    finally:
        patches.undo()

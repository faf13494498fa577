"""Names of streams that libraries take when they are imported."""

from __future__ import annotations

import torch

from moreh_ap.device.cuda import cuda_streams
from moreh_ap.patching import Patches


def test_a_build_without_cuda_has_the_number_of_the_stream_while_the_line_is_on():
    before, patches = vars(torch._C).get("_cuda_getCurrentRawStream"), Patches()
    cuda_streams.install(patches, None)
    try:
        assert torch._C._cuda_getCurrentRawStream(0) == 0
    finally:
        patches.undo()
    assert vars(torch._C).get("_cuda_getCurrentRawStream") is before

"""Which streams the workers go on from, and where they leave those of the script."""

from __future__ import annotations

import pytest
import torch

from moreh_ap.parallelizer.rng.policy import streams_untouched
from moreh_ap.protocol.rng_state import Streams, state_of_stream
from moreh_ap.session.rng_streams import AcceleratorGenerator, GpuGenerator, ProcessGenerator


@pytest.fixture(autouse=True)
def leave_streams_alone():
    with streams_untouched(None):
        yield


@pytest.mark.parametrize("make", [GpuGenerator, ProcessGenerator])
def test_a_forward_goes_on_from_the_scripts_stream_on_the_cpu_whatever_the_devices_are(make):
    generator = make()
    torch.manual_seed(3)
    streams = generator.streams()
    assert streams.torch == state_of_stream()
    torch.rand(5)
    left = state_of_stream()
    torch.manual_seed(3)
    generator.go_on_from(Streams(left, streams.host))
    assert state_of_stream() == left


def test_a_trial_leaves_the_scripts_stream_on_the_cpu_alone():
    generator = AcceleratorGenerator()
    before = state_of_stream()
    streams = generator.streams()
    generator.go_on_from(streams)
    assert streams.torch is None and state_of_stream() == before


def test_only_where_workers_are_on_cpus_is_that_stream_the_accelerators_own():
    torch.manual_seed(3)
    of_gpu, of_process = GpuGenerator(), ProcessGenerator()
    states = of_gpu.state(), of_process.state()
    wanted = torch.rand(())
    of_gpu.set_state(states[0])
    assert not torch.equal(torch.rand(()), wanted)
    of_process.set_state(states[1])
    assert torch.equal(torch.rand(()), wanted)

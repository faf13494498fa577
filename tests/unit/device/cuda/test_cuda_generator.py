"""Generators of the accelerator."""

from __future__ import annotations

import torch

from moreh_ap.device.cuda.cuda_generator import Generator
from moreh_ap.device.tensor import ACCELERATOR


def test_a_generator_of_the_accelerator():
    generator = Generator(device="cuda")
    generator.manual_seed(5)
    state = generator.get_state()
    first = torch.randn(3, generator=generator, device="cuda")
    generator.set_state(state)
    again = torch.empty(3, device="cuda").normal_(generator=generator)
    assert generator.device == ACCELERATOR and first.is_cuda and torch.equal(first.cpu(), again.cpu())
    assert torch.equal(first.cpu(), torch.randn(3, generator=torch.Generator().manual_seed(5)))
    assert isinstance(Generator(), torch.Generator) and Generator().device == torch.device("cpu")
    assert isinstance(torch.Generator(), Generator) and isinstance(generator, torch.Generator)
    loader = torch.utils.data.DataLoader(range(8), shuffle=True, batch_size=4, generator=generator)
    assert sorted(torch.cat(list(loader)).tolist()) == list(range(8))

"""Hooks of the script, told from those of libraries."""

from __future__ import annotations

import torch

from moreh_ap.session.models.script_hooks import has_hooks_of_script


def test_a_hook_of_the_script_is_told_from_those_of_libraries():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.utils.spectral_norm(torch.nn.Linear(2, 2)))
    assert not has_hooks_of_script(model)
    handle = model[0].register_forward_hook(lambda module, args, output: None)
    assert has_hooks_of_script(model)
    handle.remove()
    model.register_full_backward_hook(lambda module, grad_input, grad_output: None)
    assert has_hooks_of_script(model)

"""Parameters that share memory on the CPU: told where the module moves."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from moreh_ap.device.patches import modules
from moreh_ap.device.patches.shared_parameters import take_apart
from moreh_ap.patching import Patches


@pytest.fixture(autouse=True)
def moves() -> Iterator[None]:
    """Has moves of modules be noted, by nobody."""
    patches = Patches()
    nobody = SimpleNamespace(
        routes=SimpleNamespace(by_id={}), note_moved=lambda root: None, note_attribute=lambda *what: None
    )
    modules.install(patches, nobody)  # type: ignore[arg-type]
    yield
    patches.undo()


class Autoencoder(nn.Module):
    """Encodes and decodes (B, 6) with one weight, seen in two ways."""

    def __init__(self, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(4, 6)
        self.decoder.weight = nn.Parameter(view(self.encoder.weight))


@pytest.mark.parametrize("move", [lambda module: module.cuda(), lambda module: module.to("cuda")])
def test_a_view_of_a_parameter_is_told_where_it_becomes_a_copy(move: Callable[[nn.Module], nn.Module]):
    model = Autoencoder(lambda weight: weight.t())
    with pytest.warns(UserWarning, match=r"'decoder.weight' shared the memory of 'encoder.weight'") as told:
        move(model)
    assert told[0].filename == __file__
    with torch.no_grad():
        model.encoder.weight.zero_()
    assert model.decoder.weight.abs().sum() > 0, "as after a move in PyTorch"


def test_parts_of_a_vector_and_frozen_views_share_nothing():
    model = Autoencoder(lambda weight: weight.t().clone())
    whole = torch.rand(24)
    model.encoder.weight, model.decoder.bias = nn.Parameter(whole[:12].view(2, 6)), nn.Parameter(whole[12:18])
    frozen = Autoencoder(lambda weight: weight.t()).requires_grad_(False)
    stays = Autoencoder(lambda weight: weight.t())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.cuda()
        model.cuda()
        frozen.cuda()
        stays.double()


@pytest.mark.parametrize("share", [lambda weight: weight.t(), lambda weight: weight.view(4, 6)[:, :4]])
def test_memory_that_is_shared_after_the_move_is_taken_apart(share: Callable[[Tensor], Tensor]):
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6 if share(torch.zeros(4, 6)).shape[0] == 6 else 4)).cuda()
    model[1].weight.data = share(model[0].weight.data)
    with pytest.warns(UserWarning, match="'1.weight' shared the memory of '0.weight'"):
        take_apart(model)
    expected = model[1].weight.tolist()
    with torch.no_grad():
        model[0].weight.zero_()
    assert model[1].weight.tolist() == expected
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        take_apart(model)


def test_modules_that_are_made_inside_of_a_transform_share_nothing():
    def called(weight: Tensor) -> Tensor:
        return torch.func.functional_call(nn.Linear(2, 3, bias=False).to("meta"), {"weight": weight}, torch.ones(1, 2))

    _, tangent = torch.func.jvp(called, (torch.zeros(3, 2),), (torch.ones(3, 2),))
    assert tangent.tolist() == [[2.0, 2.0, 2.0]]

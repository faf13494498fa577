"""Modules whose parameters FSDP2 would not find by their names."""

from __future__ import annotations

from torch import nn

from moreh_ap.protocol.blocks import module_that_renames, parameters_with_all_names


class Stacked(nn.Module):
    """Keeps parameters as TensorDict does, by names with dots."""

    def __init__(self) -> None:
        super().__init__()
        self._parameters["0.weight"] = nn.Linear(2, 2).weight


class Renamed(nn.Linear):
    def named_parameters(self, prefix: str = "", recurse: bool = True):  # type: ignore[override]
        yield from super().named_parameters(prefix, recurse)


class PassedOn(nn.Linear):
    def named_parameters(self, *args, **kwargs):
        yield from super().named_parameters(*args, **kwargs)


def test_names_with_dots_and_other_arguments_are_found_inside_of_a_model():
    stacked, renamed = Stacked(), Renamed(2, 2)
    assert module_that_renames(nn.Sequential(nn.Linear(2, 2), stacked)) is stacked
    assert module_that_renames(nn.Sequential(nn.Linear(2, 2), renamed)) is renamed


def test_usual_modules_are_not_found():
    assert module_that_renames(nn.Sequential(PassedOn(2, 2), nn.ParameterDict({"a": nn.Linear(2, 2).weight}))) is None


def test_every_name_of_a_tied_parameter_is_given_unless_the_module_gives_one():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    assert [name for name, _ in parameters_with_all_names(model)] == ["0.weight", "1.weight"]

    class Loss(nn.Sequential):
        """As the losses of TorchRL: hides some parameters, and does not take all arguments."""

        def named_parameters(self, prefix: str = "", recurse: bool = True):  # type: ignore[override]
            yield from super().named_parameters(prefix, recurse)

    assert [name for name, _ in parameters_with_all_names(Loss(*model))] == ["0.weight"]

"""Numbers that a forward reads, or compares with others, and which of them several rows have made."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from moreh_ap.parallelizer.row_dims.read_numbers import (
    ASKS_NUMBERS,
    READS_NUMBERS,
    TAKES_ROWS,
    ReadNumbers,
    do_hooks_meet_rows,
    why_rows_meet,
)

X = torch.tensor([[3.0, 4.0], [6.0, 8.0]])


def noted(forward) -> tuple[ReadNumbers, list[ReadNumbers]]:
    """Returns what was noted of all rows together, and of each by itself."""
    modes = [ReadNumbers() for _ in range(3)]
    for mode, rows in zip(modes, (X, X[:1], X[1:])):
        with mode:
            forward(rows)
    return modes[0], modes[1:]


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x.norm().item(),
        lambda x: float(x.norm()),
        lambda x: x.norm() < 7,
        lambda x: torch.le(x.norm(), 7),
        lambda x: x > x.mean(),
        lambda x: x.mean(0).tolist(),
        lambda x: (x[:, 0] > 0).float().sum() == len(x),  # whether all rows are done
    ],
)
def test_a_number_of_several_rows_is_a_reason(forward):
    assert why_rows_meet(*noted(forward)) == READS_NUMBERS


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x.norm(),  # nothing is read
        lambda x: [row.norm().item() for row in x],
        lambda x: x.norm(dim=1).tolist(),
        lambda x: x[0, 0].item(),  # that of the first row, whichever rows there are
        lambda x: x.max().item(),
        lambda x: torch.tensor(0.5).item(),
        lambda x: x.norm(dim=1) < 7,
        lambda x: x.long().sum().item(),  # a count
        lambda x: x.new_tensor(math.nan).item(),
    ],
)
def test_a_number_of_one_row_or_of_none_is_no_reason(forward):
    assert why_rows_meet(*noted(forward)) == ""


def test_rows_that_are_taken_by_their_values_are_a_reason_too():
    assert why_rows_meet(*noted(lambda x: x[:, 0].topk(1))) == TAKES_ROWS


def test_workers_that_know_their_own_rows_alone_are_no_reason():
    together, (first, _) = noted(lambda x: x.norm(dim=1).tolist())
    assert why_rows_meet(together, [first]) == ""


def test_what_differs_by_rounding_is_one_number():
    together, apart = ReadNumbers(), ReadNumbers()
    together.numbers, apart.numbers = [1.0, 1e-9], [1.00001, 3e-8]
    assert why_rows_meet(together, [apart]) == ""


def test_hooks_that_the_forward_puts_on_tensors_read_numbers_of_rows():
    def noted(rows: torch.Tensor) -> ReadNumbers:
        given = rows.clone().requires_grad_()
        with ReadNumbers() as found:
            made = given * 2
            made.register_hook(lambda gradient: gradient / gradient.norm().item())
        made.sum().backward()
        return found

    rows = torch.ones(2, 3)
    together, apart = noted(rows), [noted(rows[:1]), noted(rows[1:])]
    assert [one.of_hooks for one in apart] == [[pytest.approx(3**0.5)]] * 2 and not together.numbers
    assert do_hooks_meet_rows([together, *apart])
    assert not do_hooks_meet_rows([apart[0], *apart])


def test_to_note_a_number_that_has_a_graph_warns_of_nothing():
    largest, before = torch.ones((), requires_grad=True) * 2, torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with ReadNumbers() as noted:
                torch.zeros(3) < largest  # noqa: B015
    finally:
        torch.set_warn_always(before)
    assert noted.numbers == [2.0]


@pytest.mark.parametrize(
    ("forward", "asks"),
    [
        (lambda x, c, held: x * c, False),
        (lambda x, c, held: (x * c).sum().item(), False),  # a number of the rows: it is noted otherwise
        (lambda x, c, held: x * (-c).exp() + held, False),
        (lambda x, c, held: x if c > 1 else -x, True),
        (lambda x, c, held: x if c * 2 + 1 > held else -x, True),
        (lambda x, c, held: x[: int(c)], True),
        (lambda x, c, held: x * (c - 1).relu(), True),
        (lambda x, c, held: x * torch.clamp(c, max=1), True),
        (lambda x, c, held: x.relu() * c, False),
    ],
)
def test_whether_a_forward_asks_a_number_among_its_arguments_what_to_do(forward, asks):
    saw: set[str] = set()
    c, module = torch.tensor(2.0), torch.nn.Module()
    module.register_buffer("held", torch.tensor(1.0))
    with ReadNumbers(saw, [c], module):
        forward(X, c, module.held)
    assert (ASKS_NUMBERS in saw) == asks

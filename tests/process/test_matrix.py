"""Every family under every plan gives the numbers of one device, or refuses the plan by name (C2, C3, C16, C24).

Five steps with clipping: every loss to 1e-5, every element of the first gradient and of the final weights to 1e-4 of
the largest in its tensor. The default run is small; `MOREH_MATRIX=full` (or `make test-matrix`) runs every cell, and
`MOREH_MATRIX_RESULTS=FILE` keeps the numbers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from families import FAMILIES
from matrix_plans import WHOLE, Cell, all_cells, default_cells
from matrix_results import Results
from matrix_run import Training, compare, train

from moreh_ap import device
from moreh_ap.errors import PlanError

pytestmark = pytest.mark.rotating  # one more family or plan each

CELLS = all_cells() if os.environ.get("MOREH_MATRIX") == "full" else default_cells()
SAYS_WHOLE = "Every device computes the whole batch"


@pytest.fixture(scope="module")
def one_device(request: pytest.FixtureRequest) -> dict[str, Training]:
    """What each family that is about to run gives in this process before the line is there."""
    device.disable()
    chosen = {item.callspec.params["cell"].family for item in request.session.items if _is_of(item, request.module)}
    return {name: train(family, "cpu") for name, family in FAMILIES.items() if name in chosen}


def _is_of(item: pytest.Item, module: object) -> bool:
    return getattr(item, "module", None) is module and hasattr(item, "callspec")


@pytest.fixture(scope="module")
def results() -> Iterator[Results]:
    """Where verdicts are kept."""
    file = os.environ.get("MOREH_MATRIX_RESULTS")
    results = Results(None if file is None else Path(file))
    yield results
    results.write()


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_the_numbers_are_those_of_one_device(
    cell: Cell,
    one_device: dict[str, Training],
    accelerator: Callable[[str], object],
    results: Results,
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected, started_s = one_device[cell.family], time.monotonic()
    try:
        accelerator(cell.text)
        got = train(FAMILIES[cell.family], "cuda")
    except PlanError as error:
        fits = cell.refusal is not None and cell.refusal in error.fact
        results.add(cell, "refused" if fits else "failed", note=error.fact, seconds=time.monotonic() - started_s)
        if not fits:
            raise
        return
    except (Exception, pytest.fail.Exception) as error:  # the second is a time-out
        results.add(cell, "failed", note=_first_line(error), seconds=time.monotonic() - started_s)
        device.disable()  # its workers may be lost; the next cell starts its own
        raise
    difference, whole = compare(got, expected), capsys.readouterr().out.partition(SAYS_WHOLE)[2].partition("\n")[0]
    wrong = difference.exceeds(cell.bf16)
    if cell.refusal is not None:
        wrong.append("the plan should have been refused")
    if whole and cell.family not in WHOLE:
        wrong.append(f"every device computed the whole batch{whole}")
    verdict = "wrong" if wrong else "exact"
    note = "; ".join(wrong) or ("whole" if whole else "")
    results.add(cell, verdict, difference=difference, note=note, seconds=time.monotonic() - started_s)
    assert not wrong, note


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".split("\n", 1)[0]


def test_the_matrix_is_whole() -> None:
    """The default run has every family, every kind of plan, and nothing that the full run does not have."""
    default, everything = set(default_cells()), set(all_cells())
    assert default <= everything
    families, kinds = {cell.family for cell in default}, {cell.plan for cell in default}
    assert len(everything) == len(FAMILIES) * len({cell.plan for cell in everything})
    assert {"replicate", "shard", "tensor", "pipeline", "recompute", "offload", "bf16"} <= kinds
    assert len(families) >= len(FAMILIES) - 4

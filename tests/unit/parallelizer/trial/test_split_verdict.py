"""Which calls one verdict is about."""

from __future__ import annotations

from dataclasses import replace

import torch

from moreh_ap.parallelizer.trial.split_verdict import SplitVerdict, Verdicts

FOUND = SplitVerdict(True, ("rows",), "")


def known(verdicts: Verdicts, number: float, rows: int = 8) -> SplitVerdict | None:
    return verdicts.known.get(verdicts.key("kind", [torch.zeros(rows, 4), torch.tensor(number)], rows))


def test_a_verdict_is_about_all_calls_of_its_kind():
    verdicts = Verdicts()
    verdicts.add("kind", [torch.zeros(8, 4), torch.tensor(0.5)], 8, (0, None), FOUND)
    assert known(verdicts, 0.5) is known(verdicts, 2.0, rows=6) is FOUND


def test_a_verdict_on_a_forward_that_asks_numbers_is_about_these():
    verdicts = Verdicts()
    verdicts.add("kind", [torch.zeros(8, 4), torch.tensor(0.5)], 8, (0, None), replace(FOUND, by_values=True))
    assert known(verdicts, 0.5, rows=6) is not None
    assert known(verdicts, 2.0) is None


def test_a_verdict_may_be_about_batches_of_one_size():
    verdicts = Verdicts()
    verdicts.add("kind", [torch.zeros(8, 4), torch.tensor(0.5)], 8, (0, None), replace(FOUND, sizes=range(8, 9)))
    assert known(verdicts, 2.0) is not None
    assert known(verdicts, 2.0, rows=6) is None

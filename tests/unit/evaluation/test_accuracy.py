"""The definitions of the figures that compare predictions with measured runs."""

from __future__ import annotations

import csv
import io

import pytest

from moreh_ap.evaluation.accuracy import evaluate, spearman
from unit.evaluation.samples import PUBLISHED

SYNTHETIC = """\
n_params_b,n_gpus,seq_len,global_batch_sequences,pp,after_pp_fix,status,tokens_per_s_per_gpu,mem_reserved_gib,\
predicted_reserved_gib,predicted_fits,predicted_step_time_s
1.0,8,1024,256,1,False,Success,1000,10,11,True,30
1.0,8,1024,256,1,False,Success,2000,20,19,True,22
1.0,8,1024,256,2,True,Success,1500,30,33,False,20
1.0,8,1024,256,2,False,Success,9000,40,44,True,1
1.0,8,1024,256,4,True,Success,500,50,40,True,40
1.0,8,1024,256,4,True,Success,800,60,66,True,41
1.0,8,1024,256,4,True,Success,400,70,66,True,19
1.0,8,1024,256,4,True,OOM,,,70,True,10
1.0,8,1024,256,4,True,OOM,,,90,False,10
1.0,8,1024,128,1,True,Success,100,10,10,True,10
1.0,8,1024,256,1,True,Other,700,,12,True,10
2.0,16,1024,256,1,True,Success,300,10,,,60
3.0,16,1024,256,1,True,Success,300,10,15,True,40
3.0,16,1024,256,1,True,Success,500,10,12,True,50
3.0,16,1024,256,8,True,Success,400,10,9,True,50
3.0,16,1024,256,1,True,Success,350,10,9,True,51
3.0,16,1024,256,1,True,Success,200,10,9,True,90
"""
EXPECTED = {
    "rows": 17,
    "feasible_rows": 15,
    "tp": 12,
    "fp": 1,
    "tn": 1,
    "fn": 1,
    "accuracy": 0.8667,
    "oom_among_called_fitting": 0.0769,
    "fitting_thrown_away": 0.0769,
    "reserved_median_abs_error": 0.1,
    "time_rows": 12,
    "time_median_abs_error": 0.1597,
    "time_mean_abs_error": 0.2476,
    "groups": 2,
    "spearman_mean": 0.1938,
    "top1_median": 2.3333,
    "top1_mean": 2.3333,
    "top3_median": 0.0,
    "top3_mean": 0.0,
}


def test_figures_by_their_definitions():
    """The expected values are what an independent program with these definitions gives for this table."""
    found = evaluate(list(csv.DictReader(io.StringIO(SYNTHETIC))))
    assert {name: round(value, 4) for name, value in found.items()} == EXPECTED


def test_published_runs_are_compared_by_tokens_and_none_may_beat_the_hardware():
    good = PUBLISHED | {"predicted_tokens_per_s_per_gpu": "6270"}
    timed = PUBLISHED | {
        "tokens_per_s_per_gpu": "", "step_time_s": "2", "global_batch_sequences": "8",
        "predicted_tokens_per_s_per_gpu": "2048",
    }  # fmt: skip
    wild = PUBLISHED | {"predicted_tokens_per_s_per_gpu": "40000"}
    found = evaluate([good, timed, wild, PUBLISHED])
    assert (found["published_rows"], found["above_peak"]) == (3, 1)
    assert found["published_median_abs_error"] == pytest.approx(0.5)


def test_ranks_of_equal_values_are_shared():
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1.0)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    assert spearman([1, 1, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9487, abs=1e-4)
    assert spearman([1, 1], [1, 2]) == 0.0

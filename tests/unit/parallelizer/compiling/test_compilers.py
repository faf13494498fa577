"""What a machine lacks, and how a reason reads."""

from __future__ import annotations

import torch

from moreh_ap.parallelizer.compiling.compilers import reason_of, why_not
from moreh_ap.protocol.messages.compile_requests import CompileRequest

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_why_nothing_can_be_compiled(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no-such-compiler is not on the PATH" in why_not(CompileRequest(), CPU)
    assert why_not(CompileRequest(), GPU) == why_not(CompileRequest("aot_eager"), CPU) == ""
    assert "a function of the script" in why_not(CompileRequest(""), CPU)
    assert "cudagraphs" in why_not(CompileRequest("cudagraphs"), GPU)
    monkeypatch.setenv("CXX", "sh")  # any program there is
    assert why_not(CompileRequest(), CPU) == ""


def test_a_reason_is_one_short_line():
    error = RuntimeError("first\n  second\n\nfourth")
    assert reason_of(error) == "first second"
    assert len(reason_of(ValueError("x" * 1000))) < 310
    assert reason_of(KeyError()) == "KeyError"

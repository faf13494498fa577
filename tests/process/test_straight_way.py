"""An ordinary training step runs through few files: those that the page on architecture lists, in their order."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from step_trace import FileTrace, result_file

from moreh_ap import device
from moreh_ap.protocol.messages.stream import ImportModules
from moreh_ap.session.session import Session

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
WARM_UP_STEPS = 12  # the first ones build the optimizer's state, and the sixth is compared with its prediction
MAX_FILES, MAX_CHANGES = 15, 150  # 14 until commands went over connections of ours, not through the engine's files
MAX_FILES_OF_WORKER = 18  # 14 until a mean took a collective less, commands came over those, and memory told of draws

OF_THE_TRACE = {"protocol/messages/lasting_commands.py", "import_hook.py"}
"""In the first, workers note that they have imported the module that begins the trace; through the second they import
the one that ends it."""


def listed(heading: str) -> list[str]:
    """The files in the numbered list below a heading of the page, or of its Korean translation."""
    section = PAGE.read_text(encoding="utf-8").split(f"#### {heading}\n")[1].split("\n#")[0]
    return re.findall(r"^\d+\. `([^`]+)`", section, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def step_and_session(accelerator: Callable[..., Session]) -> tuple[Callable[[], float], Session]:
    """A step of a Llama of two layers, which has run a few times, and its session.

    The workers are new: those that earlier tests used may still hold models of them, which a step walks over.
    """
    transformers = pytest.importorskip("transformers")
    device.disable()
    session = accelerator("replicate=2", recovery="off")  # which files recovery adds stands below the list
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=503, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.AutoModelForCausalLM.from_config(config).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids_BT = torch.randint(0, 503, (8, 64)).cuda()

    def step() -> float:
        loss = model(input_ids=ids_BT, labels=ids_BT).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    for _ in range(WARM_UP_STEPS):
        step()
    return step, session


@contextmanager
def no_finalizers() -> Iterator[None]:
    """Inside, no finalizer of earlier tests runs: what it releases on the workers is no part of the step."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_the_controller(step_and_session: tuple[Callable[[], float], Session]) -> None:
    step, _ = step_and_session
    trace = FileTrace()
    with no_finalizers():
        sys.setprofile(trace)
        try:
            step()
        finally:
            sys.setprofile(None)
    assert trace.files == listed("In the controller")
    assert len(trace.files) <= MAX_FILES and trace.changes <= MAX_CHANGES, trace.changes


def test_a_worker(step_and_session: tuple[Callable[[], float], Session]) -> None:
    step, session = step_and_session
    with no_finalizers():
        session.synchronize()  # the workers forget what finalizers have released
        session.outbox.submit(ImportModules(("step_trace_begin",))).result()
        step()
        session.outbox.submit(ImportModules(("step_trace_end",))).result()
    for pid in session.workers.pids:
        file = result_file(pid)
        files = [name for name in file.read_text().split("\n") if name not in OF_THE_TRACE]
        file.unlink()
        assert files == listed("In a worker"), set(files) ^ set(listed("In a worker"))
        assert len(files) <= MAX_FILES_OF_WORKER

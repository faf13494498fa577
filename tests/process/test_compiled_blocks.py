"""`torch.compile` of a script: the workers compile blocks, with the numbers of one process, or the log says why not.

All but one test take `aot_eager`, which goes through the compiler and makes no code: the same kernels in one order.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from test_one_line_training import assert_same, on_both
from torch import nn
from user_script import UserScript

from moreh_ap import device
from moreh_ap.errors import PlanError
from moreh_ap.local import cpp_compiler
from moreh_ap.local.cache_files import FOLDER_VARIABLE
from moreh_ap.protocol.messages.models import BuildModel, UseCompiledBlocks
from moreh_ap.protocol.messages.optimizers import StepOptimizer
from moreh_ap.session.planning import compiled_runs, plan_selection, step_watch
from moreh_ap.session.planning.compiled_runs import Measured

pytestmark = pytest.mark.rotating  # one more way to compile each

WIDTH, WORDS = 16, 20


class Block(nn.Module):
    """A block without anything that a compiler cannot follow."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden_BTH):
        return hidden_BTH + self.down(F.gelu(self.up(self.norm(hidden_BTH))))


class Dropping(Block):
    def forward(self, hidden_BTH):
        return F.dropout(super().forward(hidden_BTH), 0.2, self.training)


class Penalised(Block):
    """Gives a loss of its own beside."""

    def forward(self, hidden_BTH):
        return super().forward(hidden_BTH), hidden_BTH.square().mean()


class Gathering(Block):
    """Each row needs those of the others, along whichever dim rows are."""

    def forward(self, hidden_BTH):
        return super().forward(hidden_BTH) + hidden_BTH.softmax(0) + hidden_BTH.softmax(1)


class Deciding(Block):
    def forward(self, hidden_BTH):
        hidden_BTH = super().forward(hidden_BTH)
        return hidden_BTH if float(hidden_BTH.detach().abs().max()) < 1e6 else hidden_BTH.zero_()


class Normalising(Block):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(5)


class Decorated(Block):
    @torch.compile(backend="aot_eager")
    def forward(self, hidden_BTH):
        return super().forward(hidden_BTH)


class Model(nn.Module):
    """Prints how many graphs its process has compiled so far."""

    def __init__(self, block=Block):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids_BT):
        hidden_BTH, penalty = self.words(ids_BT), 0
        for block in self.blocks:
            hidden_BTH = block(hidden_BTH)
            if isinstance(hidden_BTH, tuple):
                hidden_BTH, own = hidden_BTH
                penalty = penalty + own
        print("graphs", torch._dynamo.utils.counters["stats"]["unique_graphs"])
        return F.cross_entropy(self.head(hidden_BTH).flatten(0, 1), ids_BT.flatten()) + penalty


def train(model, device, call=None, rows=(6, 6, 6, 5), between=None):
    """Losses and weights of some steps; `between(step)` runs before each."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    generator = torch.Generator().manual_seed(1)
    for step, count in enumerate(rows):
        if between is not None:
            between(step)
        ids_BT = torch.randint(0, WORDS, (count, 5), generator=generator).to(device)
        loss = (model if call is None else call)(ids_BT)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *model.parameters()]


def compiled_model(model, **options):
    return torch.compile(model, backend="aot_eager", **options)


def compiled_in_place(model):
    model.compile(backend="aot_eager")
    return model


def compiled_blocks(model):
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend="aot_eager")
    return model


WAYS = {"model": compiled_model, "in place": compiled_in_place, "blocks": compiled_blocks}


def shown(capsys, text, seconds=10):
    """Everything that was printed once `text` is there; workers' lines come a moment later."""
    seen, until = capsys.readouterr().out, time.monotonic() + seconds
    while text not in seen and time.monotonic() < until:
        time.sleep(0.05)
        seen += capsys.readouterr().out
    return seen


@pytest.fixture(autouse=True)
def counts_begin_at_zero():
    """Other tests compile in this process too."""
    torch._dynamo.utils.counters.clear()


def graphs_of(seen):
    """How many graphs a worker had compiled by the end of the last forward that was printed."""
    return int(re.findall(r"graphs (\d+)", seen)[-1])


@pytest.mark.parametrize("way", WAYS)
def test_what_a_script_compiles_is_compiled_in_the_workers(accelerator, capsys, way):
    accelerator("replicate=2")

    def script(device):
        model = Model().to(device)
        return train(model, device, WAYS[way](model))

    expected, got = on_both(lambda device: (script(device), capsys.readouterr().out))
    assert graphs_of(expected[1]) == 0, "nothing is compiled in the script's process"
    assert_same(expected[0], got[0])
    seen = got[1] + capsys.readouterr().out
    assert graphs_of(seen) > 0
    assert 'plan="replicate=2,compile=blocks"' in seen
    assert "runs uncompiled" not in seen


@pytest.mark.parametrize(
    "plan",
    [
        "shard=2",
        "shard=2,micro_batches=2,recompute=full",
        "replicate=2,recompute=selective",
        "shard=2,recompute=1",
        "pipeline=2",
    ],
)
def test_plans_that_compile_blocks(accelerator, capsys, plan):
    accelerator(f"{plan},compile=blocks")

    def script(device):
        model = Model().to(device)
        return train(model, device, compiled_model(model))

    assert_same(*on_both(script))
    seen = capsys.readouterr().out
    assert "compile=blocks" in seen
    assert "runs uncompiled" not in seen


def test_nothing_is_compiled_again_after_the_third_step(accelerator, capsys):
    """The second number of rows makes sizes variables, which all others have in common."""
    accelerator("shard=2")
    model, seen = Model().cuda(), []

    def between(step):
        torch.cuda.synchronize()
        time.sleep(0.3)  # what workers print comes a moment later
        seen.append(capsys.readouterr().out)

    train(model, "cuda", compiled_model(model), (6, 6, 8, 6, 10, 8, 6), between)
    between(7)
    time.sleep(1.0)
    seen.append(capsys.readouterr().out)
    counts = [int(count) for count in re.findall(r"^graphs (\d+)", "".join(seen), re.MULTILINE)]  # of worker 0
    assert counts[-1] > 0
    assert len(set(counts[-5:])) == 1, f"after the third step of seven something was compiled again: {counts}"


def test_a_model_is_compiled_late_and_evaluated(accelerator, capsys):
    accelerator("replicate=2")

    def script(device):
        model = Model().to(device)

        def between(step):
            if step == 2:
                model.compile(backend="aot_eager")

        losses = train(model, device, rows=(4, 4, 4, 4), between=between)
        with torch.no_grad():
            losses.append(model.eval()(torch.arange(20).view(4, 5).to(device)))
        return losses

    assert_same(*on_both(script))
    seen = capsys.readouterr().out
    assert 'plan="replicate=2"' in seen
    assert graphs_of(seen) > graphs_of(seen.partition('plan="replicate=2,compile=blocks"')[0])


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (Dropping, "it draws random numbers (dropout)"),
        (Penalised, "it takes a mean over the rows of the batch"),
        (Gathering, "rows of several workers meet"),
        (Deciding, "data-dependent"),
        (Normalising, "rows of several workers meet"),
    ],
)
def test_a_block_that_cannot_be_compiled_runs_as_written_and_the_log_says_why(accelerator, capsys, block, reason):
    accelerator("replicate=2")

    def script(device):
        model = Model(block).to(device)
        return train(model, device, compiled_model(model), (4, 4))

    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)
    seen = shown(capsys, reason)
    assert f"compile: {block.__name__} runs uncompiled: " in seen
    assert reason in seen


def test_a_block_whose_forward_is_decorated(accelerator, capsys):
    accelerator("replicate=2")
    train(Model(Decorated).cuda(), "cuda", rows=(4, 4))
    assert 'plan="replicate=2,compile=blocks"' in shown(capsys, "graphs ")


def test_a_hook_that_comes_to_a_compiled_block_runs(accelerator):
    accelerator("replicate=2")

    def script(device):
        model = Model().to(device)
        call = compiled_model(model)

        def between(step):
            if step == 2:
                model.blocks[0].up.register_forward_hook(lambda module, args, output: output * 2)

        return train(model, device, call, (4, 4, 4), between)

    assert_same(*on_both(script))


def test_options_that_workers_cannot_have(accelerator, capsys):
    accelerator("replicate=2")
    model = Model().cuda()
    train(model, "cuda", torch.compile(model, backend=lambda graph, inputs: graph), (4,))
    assert "its backend is a function of the script" in shown(capsys, "function of the script")
    model = Model(Deciding).cuda()
    with pytest.raises(Exception, match="data-dependent"):
        train(model, "cuda", compiled_model(model, fullgraph=True), (4,))


def test_plans_and_models_without_compiled_blocks(accelerator, capsys):
    accelerator("tensor=2")
    model = Model().cuda()
    train(model, "cuda", compiled_model(model), (4,))
    assert "runs uncompiled: tensor=2 has devices exchange activations" in capsys.readouterr().out
    accelerator("replicate=2")
    model = nn.Linear(WIDTH, WIDTH).cuda()
    torch.compile(model)(torch.ones(4, WIDTH).cuda()).sum().backward()
    assert "the model runs uncompiled: it has no list of equal blocks" in capsys.readouterr().out
    accelerator("replicate=2,compile=blocks")
    with pytest.raises(PlanError, match="compile=blocks needs repeated blocks"):
        nn.Linear(WIDTH, WIDTH).cuda()(torch.ones(4, WIDTH).cuda())


def leave_open(accelerator):
    """Leaves the plan to the planner, which tries the best ones."""
    session = accelerator("replicate=2", autotune=True)
    device.current().options = session.options = replace(session.options, plan=None)


@pytest.mark.parametrize("pays", [True, False])
def test_autotune_tries_compiled_blocks_and_keeps_them_where_they_pay(accelerator, capsys, monkeypatch, pays):
    """By the inductor, which is what a planner's plan has blocks compiled with."""
    if cpp_compiler.missing():
        pytest.skip("no C++ compiler")
    tried = []
    monkeypatch.setattr(Measured, "pays", property(lambda measured: tried.append(measured) or pays))
    leave_open(accelerator)
    assert_same(*on_both(lambda device: train(Model().to(device), device)), rtol=1e-4)
    measured = tried[0]
    assert measured.compiling_s > 0
    seen = capsys.readouterr().out
    kept = "compile=blocks is kept" if pays else "blocks run as written"
    assert f"{measured.written_s:.3g} s as written" in seen and kept in seen
    (chosen,) = re.findall(r'plan="([^"]*)" \(the fastest of those tried', seen)
    assert ("compile=blocks" in chosen) is pays


@pytest.mark.parametrize("pays", [True, False])
def test_gpu_workers_try_compiled_blocks_after_the_first_steps(accelerator, capsys, monkeypatch, tmp_path, pays):
    """Here CPU workers do, which are told that they are quick."""
    if cpp_compiler.missing():
        pytest.skip("no C++ compiler")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(plan_selection, "compiles_quickly", lambda device_type: True)
    monkeypatch.setattr(compiled_runs, "LEAST_STEP_S", 0.0)
    monkeypatch.setattr(compiled_runs, "WRITTEN_FIRST_S", 0.0)
    monkeypatch.setattr(step_watch, "_LEAST_S", 0.0)
    monkeypatch.setattr(Measured, "pays", property(lambda measured: pays))
    session = accelerator("replicate=2")
    device.current().options = session.options = replace(session.options, plan=None, strict=True)
    sent = []
    session.outbox.on_sent = lambda commands, posted: sent.extend(commands)

    def script(device):
        return train(Model().to(device), device, rows=(6,) * 24)

    assert_same(*on_both(script), rtol=1e-4)
    session.outbox.on_sent = None
    (built,) = [place for place, command in enumerate(sent) if isinstance(command, BuildModel)]
    kinds = (UseCompiledBlocks, StepOptimizer)
    made = [getattr(command, "is_on", "step") for command in sent[built:] if isinstance(command, kinds)]
    steps = ["step"] * 6  # after which the script waits once, and is not ahead
    assert made == [*steps, True, *steps, *([] if pays else [False]), *["step"] * 12]
    seen = capsys.readouterr().out
    kept = "compile=blocks is kept" if pays else "blocks run as written"
    assert "blocks are compiled now" in seen and kept in seen
    graphs = [int(one) for one in re.findall(r"graphs (\d+)", seen.partition("blocks are compiled now")[2])]
    assert max(graphs) > 0, "blocks were compiled"
    saved = json.loads((tmp_path / "learned.json").read_text())
    plans = [run["plan"] for entry in saved.values() for run in entry["runs"] if "measured_s" in run]
    assert len(plans) == 2 and "compile=blocks" not in plans[0] and "compile=blocks" in plans[1]
    script("cuda")
    assert "blocks are compiled now" not in capsys.readouterr().out, "it is known"


def test_what_paid_in_an_earlier_run_is_compiled_without_a_trial(accelerator, capsys, monkeypatch, tmp_path):
    if cpp_compiler.missing():
        pytest.skip("no C++ compiler")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    session = accelerator("replicate=2")
    device.current().options = session.options = replace(session.options, plan=None, strict=True)
    chosen = []
    monkeypatch.setattr(plan_selection, "measured", lambda *asked: chosen.append(asked) or None)
    train(Model().cuda(), "cuda")
    monkeypatch.undo()
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    ((machine, model, batch, plan),) = chosen
    assert f'plan="{plan}"' in capsys.readouterr().out
    runs = [(plan, 2.0, 1.0), (plan.with_compiled_blocks(), 30.0, 0.5)]
    saved = [
        {"model": model, "batch": batch, "plan": str(one), "first_s": first_s, "measured_s": seconds}
        for one, first_s, seconds in runs
    ]
    (tmp_path / "learned.json").write_text(json.dumps({machine: {"runs": saved}}))
    declined = Model().cuda()
    declined.compile(disable=True)
    train(declined, "cuda")
    assert "compile=blocks" not in capsys.readouterr().out
    assert_same(*on_both(lambda device: train(Model().to(device), device)), rtol=1e-4)
    seen = capsys.readouterr().out
    assert f'plan="{plan.with_compiled_blocks()}"' in seen
    assert "blocks are compiled: a step took 0.5 s in an earlier run, 1 s as written" in seen


def test_autotune_says_nothing_of_compiled_blocks_without_a_compiler(accelerator, capsys, monkeypatch):
    monkeypatch.setattr(cpp_compiler, "missing", lambda: "g++")
    leave_open(accelerator)
    assert_same(*on_both(lambda device: train(Model().to(device), device)))
    seen = capsys.readouterr().out
    assert "the fastest of those tried" in seen and "compiled blocks" not in seen and "compile=" not in seen


def test_a_block_compiled_by_the_inductor_trains_as_in_a_plain_process(tmp_path):
    ours, plain = _lines(tmp_path, "--ap"), _lines(tmp_path)
    assert ours["loss"] == plain["loss"]
    assert ours["graphs"][-1] == plain["graphs"][-1] == "1"


def test_without_a_c_compiler_blocks_run_as_written(tmp_path):
    lines = _lines(tmp_path, "--ap", CXX="no-such-compiler")
    assert lines["graphs"][-1] == "0"
    assert any("Block runs uncompiled: there is no C++ compiler: no-such-compiler" in line for line in lines["[info]"])


def _lines(folder, *arguments, **variables):
    """What the script prints, by the first word of each line."""
    found = {"loss": [], "graphs": [], "[info]": []}
    with UserScript("compiled_block.py", *arguments, cwd=folder, **variables) as script:
        for line in script.succeed().splitlines():
            word, _, rest = line.removeprefix("[worker 0] ").partition(" ")
            found.setdefault(word, []).append(rest)
    return found

"""The one line: what it accepts, from arguments and environment, and what it refuses at the call."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moreh_ap import settings
from moreh_ap.accelerator import enabling
from moreh_ap.errors import OptionError, PlanError
from moreh_ap.option import enable_advanced_parallelization
from moreh_ap.plan import Plan
from moreh_ap.settings import Options, enabled_by_environment

PREFIX = "MOREH_ADVANCED_PARALLELIZATION_"


@pytest.fixture(autouse=True)
def enabled(monkeypatch):
    """The options that reach the accelerator, which is replaced by a list."""
    seen: list[Options] = []
    monkeypatch.setattr(enabling, "enable", seen.append)
    for name in ("MAX_PARALLEL_COMPILE_THREADS", "DETAILED_LOG", "MEMORY_USAGE_CORRECTION_RATIO"):
        monkeypatch.delenv(PREFIX + name, raising=False)
    for name in ("MOREH_NUM_DEVICES", "MOREH_PLAN"):
        monkeypatch.delenv(name, raising=False)
    return seen


def test_defaults(enabled):
    enable_advanced_parallelization()
    assert enabled == [Options(True, "auto", "auto", "auto", "auto", True, None, None, False, 16, 0, 80)]


def test_documented_order_of_arguments(enabled):
    enable_advanced_parallelization(False, 4, 2, False, True, False)
    assert enabled[0] == Options(False, 4, 2, False, True, False)


def test_the_folder_of_automatic_checkpoints(enabled, monkeypatch):
    enable_advanced_parallelization(autosave="mine")
    monkeypatch.setenv("MOREH_AUTOSAVE", "of the environment")
    monkeypatch.setenv("MOREH_AUTOSAVE_MINUTES", "2.5")
    enable_advanced_parallelization()
    enable_advanced_parallelization(autosave=Path("mine"))
    assert [(one.autosave_folder, one.autosave_minutes) for one in enabled] == [
        ("mine", 10),
        ("of the environment", 2.5),
        ("mine", 2.5),
    ]
    with pytest.raises(OptionError, match="autosave=True"):
        enable_advanced_parallelization(autosave=True)
    for text in ("0", "-1", "soon", "nan", "inf"):
        monkeypatch.setenv("MOREH_AUTOSAVE_MINUTES", text)
        with pytest.raises(OptionError, match=f"MOREH_AUTOSAVE_MINUTES='{text}'"):
            enable_advanced_parallelization()


def test_hosts_that_may_join(enabled, monkeypatch, tmp_path):
    file = tmp_path / "hosts"
    file.write_text("node1\n")
    enable_advanced_parallelization(hosts=str(file), elastic=True)
    monkeypatch.setenv("MOREH_HOSTS", str(file))
    enable_advanced_parallelization()
    monkeypatch.setenv("MOREH_ELASTIC", "1")
    enable_advanced_parallelization(recovery="memory")
    enable_advanced_parallelization(elastic=False)
    enable_advanced_parallelization(hosts=["node1"])
    assert [(one.elastic, one.hosts, one.hosts_file) for one in enabled] == [
        (True, ("node1",), str(file)),
        (False, ("node1",), str(file)),
        (True, ("node1",), str(file)),
        (False, ("node1",), str(file)),
        (True, ("node1",), ""),
    ]
    monkeypatch.setenv("MOREH_RECOVERY", "off")
    with pytest.raises(OptionError, match="elastic=True, but recovery is off"):
        enable_advanced_parallelization()


def test_plan_as_text_and_as_object(enabled):
    enable_advanced_parallelization(plan="replicate=2,shard=2")
    enable_advanced_parallelization(plan=Plan(2, 2))
    assert enabled[0] == enabled[1]
    assert enabled[0].devices == 4


def test_environment(enabled, monkeypatch):
    monkeypatch.setenv("MOREH_NUM_DEVICES", "3")
    monkeypatch.setenv(PREFIX + "MAX_PARALLEL_COMPILE_THREADS", "4")
    monkeypatch.setenv(PREFIX + "DETAILED_LOG", "2")
    monkeypatch.setenv(PREFIX + "MEMORY_USAGE_CORRECTION_RATIO", "70")
    enable_advanced_parallelization()
    options = enabled[0]
    assert (options.devices, options.max_parallel_compile_threads) == (3, 4)
    assert (options.detailed_log, options.memory_usage_correction_ratio) == (2, 70)


@pytest.mark.parametrize(("text", "steps"), [("", (13, 15)), ("4", (4, 4)), ("2-20", (2, 20)), (" 2 - 3 ", (2, 3))])
def test_traced_steps(enabled, monkeypatch, text, steps):
    monkeypatch.setenv("MOREH_TRACE", "trace.json")
    monkeypatch.setenv("MOREH_TRACE_STEPS", text)
    enable_advanced_parallelization()
    assert (enabled[0].trace_file, enabled[0].trace_steps) == ("trace.json", steps)


def test_the_plan_of_the_environment_is_used_unless_the_line_names_one(enabled, monkeypatch):
    monkeypatch.setenv("MOREH_PLAN", " shard=2,micro_batches=4 ")
    enable_advanced_parallelization()
    enable_advanced_parallelization(plan="replicate=4")
    assert [(str(one.plan), one.devices) for one in enabled] == [("shard=2,micro_batches=4", 2), ("replicate=4", 4)]
    with pytest.raises(OptionError, match="mixed_precision=False"):
        monkeypatch.setenv("MOREH_PLAN", "shard=2,precision=bf16")
        enable_advanced_parallelization(mixed_precision=False)
    monkeypatch.setenv("MOREH_PLAN", "shards=2")
    with pytest.raises(PlanError, match="environment: MOREH_PLAN='shards=2': plan: cannot read") as caught:
        enable_advanced_parallelization()
    assert caught.value.fix == "export MOREH_PLAN=shard=2"


def test_variables_with_nearly_the_name_of_one_that_is_read_are_named():
    names = ("HOME", "MOREH_AP_CACHE", "MOREH_CI_PART", "MOREH_DEVICES", "MOREH_PLAN")
    assert settings.unread_variables(dict.fromkeys(names, "1")) == [
        "The variable MOREH_DEVICES is not read: the nearest name that is read is MOREH_NUM_DEVICES.",
    ]


def test_every_variable_that_the_package_names_is_known():
    package = Path(settings.__file__).parent
    named = {
        name
        for path in package.rglob("*.py")
        for name in re.findall(r'"(MOREH_[A-Z_]*[A-Z])"', path.read_text("utf-8"))
    }
    assert len(named) > 15
    assert {name for name in named if not name.startswith("MOREH_AP")} - {"MOREH_AP"} <= settings.VARIABLES


def test_empty_variable_is_no_variable(enabled, monkeypatch):
    monkeypatch.setenv("MOREH_NUM_DEVICES", "")
    enable_advanced_parallelization()
    assert enabled[0].devices is None


@pytest.mark.parametrize("argument", [{"devices": 2}, {"plan": "shard=2"}])
def test_argument_outranks_environment(enabled, monkeypatch, argument):
    monkeypatch.setenv("MOREH_NUM_DEVICES", "4")
    enable_advanced_parallelization(**argument)
    assert enabled[0].devices == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MOREH_NUM_DEVICES", "0"),
        ("MOREH_NUM_DEVICES", "two"),
        ("MOREH_NUM_DEVICES", "-1"),
        ("MOREH_NUM_DEVICES", "²"),
        (PREFIX + "MAX_PARALLEL_COMPILE_THREADS", "0"),
        (PREFIX + "DETAILED_LOG", "3"),
        (PREFIX + "MEMORY_USAGE_CORRECTION_RATIO", "101"),
        (PREFIX + "MEMORY_USAGE_CORRECTION_RATIO", "0.8"),
        ("MOREH_ELASTIC", "yes"),
        ("MOREH_TRACE_STEPS", "0"),
        ("MOREH_TRACE_STEPS", "5-3"),
        ("MOREH_TRACE_STEPS", "1-2-3"),
        ("MOREH_TRACE_STEPS", "3-"),
    ],
)
def test_wrong_variable(enabled, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(OptionError) as caught:
        enable_advanced_parallelization()
    assert name in caught.value.fact
    assert value in caught.value.fact
    assert not enabled


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("pipeline_parallel", [1, 0, "auto", None]),
        ("num_stages", [True, 0, -2, 2.0, "4", None]),
        ("num_micro_batches", [True, 0, -2, 2.0, "4", None]),
        ("activation_recomputation", [1, "yes", None]),
        ("distribute_parameter", [1, 0, "yes", None]),
        ("mixed_precision", [1, "auto", "bf16", None]),
        ("devices", [True, 0, -1, 2.0, "2", "auto"]),
        ("elastic", [1, 0, "yes"]),
    ],
)
def test_wrong_argument(enabled, name, values):
    for value in values:
        with pytest.raises(OptionError) as caught:
            enable_advanced_parallelization(**{name: value})
        assert caught.value.fact.startswith(f"{name}={value!r}")
        assert not enabled


def test_the_line_to_paste_is_accepted(enabled):
    with pytest.raises(OptionError) as caught:
        enable_advanced_parallelization(num_stages=0)
    prefix = "torch.moreh.option."
    assert caught.value.fix.startswith(prefix)
    eval(caught.value.fix.removeprefix(prefix), {"enable_advanced_parallelization": enable_advanced_parallelization})
    assert len(enabled) == 1


@pytest.mark.parametrize("plan", ["context=2", 4, b"shard=2", "shard=0", "pipeline=2,layers=1"])
def test_wrong_plan(enabled, plan):
    with pytest.raises(PlanError):
        enable_advanced_parallelization(plan=plan)
    assert not enabled


@pytest.mark.parametrize(
    ("plan", "other"),
    [
        ("replicate=2", {"devices": 4}),
        ("replicate=2,micro_batches=2", {"num_micro_batches": 4}),
        ("shard=2", {"distribute_parameter": False}),
        ("replicate=2", {"distribute_parameter": True}),
        ("precision=bf16", {"mixed_precision": False}),
        ("tensor=2,pipeline=2", {"devices": 2}),
        ("pipeline=2", {"pipeline_parallel": False}),
        ("pipeline=4", {"num_stages": 2}),
        ("pipeline=2,schedule=interleaved", {"num_stages": 2}),
        ("pipeline=2", {"num_micro_batches": 1}),
        ("replicate=2", {"activation_recomputation": True}),
        ("recompute=selective", {"activation_recomputation": False}),
        ("recompute=1", {"activation_recomputation": False}),
        ("replicate=2,tensor=2", {"distribute_parameter": True}),
    ],
)
def test_plan_and_argument_that_contradict(enabled, plan, other):
    with pytest.raises(OptionError, match=next(iter(other))):
        enable_advanced_parallelization(plan=plan, **other)
    assert not enabled


@pytest.mark.parametrize(
    "argument",
    [
        {"devices": 2},
        {"num_micro_batches": 2},
        {"distribute_parameter": True},
        {"mixed_precision": False},
        {"num_stages": 4},
    ],
)
def test_plan_and_argument_that_agree(enabled, argument):
    enable_advanced_parallelization(plan="shard=2,micro_batches=2", **argument)
    assert enabled[0].plan == Plan(shard=2, micro_batches=2)


@pytest.mark.parametrize(
    ("plan", "argument"),
    [
        ("pipeline=2", {"pipeline_parallel": True}),
        ("pipeline=2", {"num_stages": 2}),
        ("pipeline=2", {"num_micro_batches": 2}),
        ("tensor=2", {"pipeline_parallel": False}),
        ("tensor=2", {"num_stages": 1}),
        ("tensor=2", {"distribute_parameter": True}),
        ("pipeline=2", {"distribute_parameter": False}),
        ("recompute=full", {"activation_recomputation": True}),
        ("recompute=2", {"activation_recomputation": True}),
        ("recompute=none", {"activation_recomputation": False}),
    ],
)
def test_plan_of_any_kind_and_argument_that_agree(enabled, plan, argument):
    enable_advanced_parallelization(plan=plan, **argument)
    assert enabled[0].plan == Plan.parse(plan)


@pytest.mark.parametrize("value", [True, False, "auto"])
def test_recomputation(enabled, value):
    enable_advanced_parallelization(activation_recomputation=value)
    assert enabled[0].activation_recomputation == value


@pytest.mark.parametrize(("value", "wanted"), [("", False), ("0", False), ("1", True), (" 1 ", True)])
def test_enabled_by_environment(value, wanted):
    assert enabled_by_environment({"MOREH_ENABLE_ADVANCED_PARALLELIZATION": value}) is wanted


@pytest.mark.parametrize("value", ["2", "yes", "true"])
def test_enabled_by_environment_refuses(value):
    with pytest.raises(OptionError, match="from 0 to 1"):
        enabled_by_environment({"MOREH_ENABLE_ADVANCED_PARALLELIZATION": value})

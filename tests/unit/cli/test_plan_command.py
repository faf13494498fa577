"""`moreh-ap plan`: its flags, its JSON, and how impossible requests end."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from moreh_ap.cli import plan_command
from moreh_ap.cli.main import USAGE_STATUS, main
from moreh_ap.errors import MorehError, OptionError, PlanError
from moreh_ap.plan import Plan
from moreh_ap.planner.profiles.known_models import find_model
from unit.cli.samples import LARGE, parse, parser_of, show


def test_json_has_every_part_and_they_add_up(capsys):
    found = json.loads(show(capsys, *LARGE, "--json", "--top", "4"))
    assert found["num_devices"] == 64 and found["usable_bytes"] == 0.8 * 64 * 2**30
    assert found["search"]["looked_at"] >= found["search"]["fitting"] >= len(found["candidates"]) == 4
    for candidate in found["candidates"]:
        assert Plan.parse(candidate["plan"]).num_devices == 64
        memory, step = candidate["memory"], candidate["step"]
        assert sum(memory["parts_bytes"].values()) == pytest.approx(memory["reserved_bytes"])
        assert sum(step["parts_s"].values()) == pytest.approx(step["total_s"])
        assert 0 < step["mfu"] < 1
        assert step["tokens_per_s"] == pytest.approx(512 * 1024 / step["total_s"])


@pytest.mark.parametrize(
    ("flags", "holds"),
    [
        (["--no-pipeline"], lambda plan: plan.pipeline == 1),
        (["--num-stages", "2"], lambda plan: plan.num_stages <= 2),
        (["--num-micro-batches", "8"], lambda plan: plan.micro_batches == 8),
        (["--activation-recomputation", "false"], lambda plan: plan.recompute == "none"),
        (["--activation-recomputation", "true"], lambda plan: plan.recompute != "none"),
        (["--distribute-parameter", "false"], lambda plan: plan.shard == 1),
        (["--no-mixed-precision"], lambda plan: plan.precision == "fp32"),
        (["--kinds"], lambda plan: plan.tensor == plan.pipeline == 1),
        (["--kinds", "tensor"], lambda plan: plan.pipeline == 1 and not plan.sequence_parallel),
    ],
)
def test_flags_hold_for_every_plan(capsys, flags, holds):
    found = json.loads(show(capsys, "Llama3-8B", "--devices", "16xH100", "--global-batch", "64", "--top", "9999",
                            "--json", *flags))  # fmt: skip
    assert len(found["candidates"]) > 0
    assert all(holds(Plan.parse(one["plan"])) for one in found["candidates"])


def test_adapters_take_less_and_their_plans_are_replicas_and_shards(capsys):
    where = ["Llama3-8B", "--devices", "8xA100", "--top", "9999", "--json"]
    full, lora, small = (
        json.loads(show(capsys, *where, *more)) for more in ([], ["--lora", "16"], ["--lora", "16", "--frozen", "4bit"])
    )
    plans = [Plan.parse(one["plan"]) for one in [*lora["candidates"], *small["candidates"]]]
    assert all(plan.tensor == plan.pipeline == 1 for plan in plans)
    taken = [
        {one["plan"]: one["memory"]["reserved_bytes"] for one in found["candidates"]} for found in (full, lora, small)
    ]
    for plan in set(taken[1]) & set(taken[0]):
        assert taken[1][plan] < taken[0][plan]
    assert all(taken[2][plan] < taken[1][plan] for plan in set(taken[2]) & set(taken[1]))


def test_llama3_70b_of_4_bits_is_planned_on_eight_devices_of_24_gb(capsys):
    where = ["Llama3-70B", "--devices", "8xRTX4090", "--lora", "16"]
    whole = json.loads(show(capsys, *where, "--json"))["candidates"][0]
    assert Plan.parse(whole["plan"]).offload == "all", "weights of 16 bits do not fit on the devices"
    best = json.loads(show(capsys, *where, "--frozen", "4bit", "--json"))["candidates"][0]
    assert best["fits"] and Plan.parse(best["plan"]).shard == 8
    assert best["memory"]["reserved_bytes"] < 0.8 * 24 * 2**30
    assert Plan.parse(best["plan"]).precision == "fp32", "a plan that a script may be given"
    for plan in ("tensor=8", "pipeline=8,micro_batches=8", "shard=8,precision=bf16"):
        with pytest.raises(PlanError, match="weights of 4 bits"):
            plan_command.run(parse(*where, "--frozen", "4bit", "--compare", plan), [])


def test_full_training_of_llama3_8b_is_planned_on_one_gpu_of_80_gb(capsys):
    where = ["Llama3-8B", "--devices", "1xH100", "--global-batch", "8", "--seq-len", "2048"]
    best = json.loads(show(capsys, *where, "--json"))["candidates"][0]
    plan = Plan.parse(best["plan"])
    assert best["fits"] and plan.offload == "all" and plan.precision == "bf16"
    assert best["memory"]["reserved_bytes"] < 0.8 * 80 * 2**30 < 16 * 8.03e9, "its state alone does not fit"
    shown = show(capsys, *where)
    needed = best["memory"]["host_bytes"] / 2**30
    assert "offload=all" in shown and f"In host memory, for a device: {needed:.1f} GiB" in shown
    assert "in host memory" in show(capsys, *where, "--compare", best["plan"])
    for text in ("replicate=1,recompute=full,precision=bf16", "recompute=full,precision=bf16,offload=optimizer"):
        compared = json.loads(show(capsys, *where, "--compare", text, "--json"))["candidates"]
        assert not next(one for one in compared if Plan.parse(one["plan"]) == Plan.parse(text))["fits"]


def test_memory_ratio(capsys):
    where = ["Llama3-8B", "--devices", "8xH100", "--json"]
    half, whole = (json.loads(show(capsys, *where, "--memory-ratio", ratio)) for ratio in ("50", "100"))
    assert whole["usable_bytes"] == 2 * half["usable_bytes"]
    assert whole["search"]["fitting"] > half["search"]["fitting"]


def test_hosts_have_the_devices_each(capsys):
    hosts = json.loads(show(capsys, "Llama3-8B", "--hosts", "4", "--devices", "2xH100", "--json"))
    same = json.loads(show(capsys, "Llama3-8B", "--devices", "8xH100", "--devices-per-node", "2", "--json"))
    assert (hosts["num_devices"], hosts["devices_per_node"]) == (8, 2)
    assert hosts["candidates"] == same["candidates"]
    usual = json.loads(show(capsys, "Llama3-8B", "--devices", "8xH100", "--json"))
    assert hosts["candidates"][0]["step"]["total_s"] > usual["candidates"][0]["step"]["total_s"], "links between hosts"


def test_hardware_and_nodes_are_another_way_to_say_devices(capsys):
    one = json.loads(show(capsys, "Llama3-8B", "--hardware", "h100", "--nodes", "4", "--json"))
    other = json.loads(show(capsys, "Llama3-8B", "--devices", "32xH100", "--json"))
    assert one["num_devices"] == 32 and one["candidates"] == other["candidates"]
    assert json.loads(show(capsys, "Llama3-8B", "--devices", "8xH100", "--json"))["global_batch"] == 8


def test_configurations(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(find_model("SmolLM2-135M").config))
    for arguments in ([str(tmp_path)], [str(tmp_path / "config.json")], ["--config", str(tmp_path / "config.json")]):
        found = json.loads(show(capsys, *arguments, "--devices", "2xL4", "--json"))
        assert found["parameters"] == 134_515_008


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        (["Lama3-8B", "--devices", "8xH100"], OptionError, "Llama3-8B"),
        (["Llama3-8B", "--devices", "8xH10"], OptionError, "H100-80GB"),
        (["Llama3-8B", "--devices", "0xH100"], OptionError, "at least 1"),
        (["Llama3-8B", "--devices", "8xH100", "--global-batch", "0"], OptionError, "--global-batch 0"),
        (["Llama3-8B", "--devices", "8xH100", "--seq-len", "0"], OptionError, "--seq-len 0"),
        (["Llama3-8B", "--devices", "8xH100", "--nodes", "2"], OptionError, "--devices with --hosts"),
        (["Llama3-8B", "--hardware", "h100", "--hosts", "2"], OptionError, "--hardware with --nodes"),
        (["Llama3-8B", "--devices", "8xH100", "--hosts", "0"], OptionError, "at least 1"),
        (["Llama3-8B", "--devices", "8xH100", "--hosts", "2", "--devices-per-node", "4"], OptionError, "each host"),
        (["Llama3-8B", "--devices", "8xH100", "--hardware", "h100"], OptionError, "--devices 8xH100 and --hardware"),
        (["Llama3-8B", "--devices", "8xH100", "--memory-ratio", "0"], OptionError, "from 1 to 100"),
        (["Llama3-8B", "--devices", "8xH100", "--num-stages", "0"], OptionError, "num_stages=0"),
        (["Llama3-8B", "--devices", "8xH100", "--kinds", "expert"], OptionError, "sequence_parallel"),
        (["Llama3-8B", "--devices", "8xH100", "--link", "string"], OptionError, "IB-NDR8"),
        (["Llama3-8B", "--devices", "8xH100", "--picture", "plan.jpg"], OptionError, ".png"),
        (["Llama3-8B", "--devices", "8xH100", "--compare", "shard=4"], PlanError, "there are 8"),
        (["Llama3-8B", "--devices", "8xH100", "--compare", "shards=8"], PlanError, "cannot read"),
        (["Llama3-8B", "--devices", "8xH100", "--memory-ratio", "101"], OptionError, "--memory-ratio 101"),
        (["Llama3-8B"], OptionError, "no devices"),
        (["Llama3-8B", "--hosts", "2"], OptionError, "Try: --hosts 2 --devices 8xH100"),
        (["--devices", "8xH100"], OptionError, "no model"),
        (["no/such/config.json", "--devices", "8xH100"], OptionError, "there is no file"),
        (["./no-such-folder", "--devices", "8xH100"], OptionError, "there is no file no-such-folder"),
        (["Llama3-70B", "--devices", "1xRTX4090"], PlanError, "Try: --devices '32xRTX 4090'"),
        (["GPT-2", "--devices", "1xT4", "--seq-len", "2000000"], PlanError, "GPT-2 takes 1,024 positions"),
        (["Llama3-70B", "--devices", "8xMI250", "--global-batch", "8"], PlanError, "flavour"),
    ],
)
def test_impossible_requests_say_what_is_possible(arguments, kind, said):
    with pytest.raises(kind) as caught:
        plan_command.run(parse(*arguments), [])
    assert isinstance(caught.value, MorehError) and caught.value.allowed
    assert said in str(caught.value)


def test_exit_status(capsys):
    where = ["--devices", "8xMI250", "--global-batch", "8"]
    assert main(["plan", "Llama3-8B", *where]) == 0
    assert main(["plan", "Llama3-70B", *where]) == USAGE_STATUS
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("out of memory: the leanest plan ") and said[0].count(" GiB") == 2
    assert said[1].startswith("Allowed: ") and "flavour 2xLarge.1024GB" in said[1]
    assert said[2].startswith("Try: --devices 16xMI250")
    assert main(["plan", "Llama3-8B", *where, "--", "train.py"]) == USAGE_STATUS


@pytest.mark.parametrize("arguments", [["--num-stages", "two"], ["--distribute-parameter", "maybe"]])
def test_words_where_numbers_belong_end_with_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        parse("Llama3-8B", "--devices", "8xH100", *arguments)
    assert caught.value.code == 2


def test_the_page_names_every_flag_and_its_commands_run(capsys, tmp_path, monkeypatch):
    page = (Path(__file__).parents[3] / "docs" / "ap" / "learn-more.md").read_text(encoding="utf-8")
    for name, action in parser_of(plan_command)._option_string_actions.items():
        assert name in ("-h", "--help") or re.search(rf"\| .*`.*{name}\b.*` .*\|", page), action.help
    monkeypatch.chdir(tmp_path)
    config = json.dumps(find_model("SmolLM2-135M").config)
    (tmp_path / "my-model").mkdir()
    for place in (tmp_path / "config.json", tmp_path / "my-model" / "config.json"):
        place.write_text(config)
    commands = re.findall(r"^moreh-ap plan (.*)$", page, re.MULTILINE)
    assert len(commands) == 4
    for line in commands:
        if "--picture" in line:
            pytest.importorskip("matplotlib", reason="matplotlib draws the image; it comes with the extra `tutorials`")
        assert "tokens/s" in show(capsys, *shlex.split(line))


def test_tables_need_no_torch():
    script = (
        "import sys\n"
        "from moreh_ap.cli.main import main\n"
        "main(['plan', 'GPT-2', '--devices', '8xA100', '--explain', '--picture'])\n"
        "sys.exit(3 if 'torch' in sys.modules or 'matplotlib' in sys.modules else 0)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=120).returncode == 0


def test_fewer_devices_that_would_be_faster_are_named(capsys):
    small = ["GPT-2", "--devices", "8xT4", "--global-batch", "2", "--seq-len", "64", "--kinds"]
    found = json.loads(show(capsys, *small, "--json"))
    fewer = found["fewer_devices"]
    assert Plan.parse(fewer["plan"]).num_devices == fewer["num_devices"] < 8
    assert fewer["step"]["total_s"] < found["candidates"][0]["step"]["total_s"]
    shown = show(capsys, *small)
    assert f"{fewer['num_devices']} of the 8 devices would be faster" in shown and f'plan="{fewer["plan"]}"' in shown
    large = ["Llama3-8B", "--devices", "8xH100", "--global-batch", "64"]
    assert json.loads(show(capsys, *large, "--json"))["fewer_devices"] is None
    assert "would be faster" not in show(capsys, *large)

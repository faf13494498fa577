"""What the planner is told of a machine, from what its workers measured and from what a file remembers."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from moreh_ap.errors import PlanError
from moreh_ap.hosts.reachability import Speed
from moreh_ap.local.cache_files import FOLDER_VARIABLE
from moreh_ap.plan import Plan
from moreh_ap.planner.cost.collectives import group_of, pipeline_messages, queued_gathers_s, queued_sums_s, tensor_sum_s
from moreh_ap.planner.cost.hardware import Link
from moreh_ap.planner.cost.step_time import estimate_step
from moreh_ap.planner.cost.training_systems import MOREH_AP, MOREH_AP_ON_CPU
from moreh_ap.planner.profiles.transformer_shape import TransformerShape, profile_of
from moreh_ap.protocol.messages.devices import DeviceInfo, DeviceRates, ProbeDevice
from moreh_ap.runtime.recovery.other_devices import DevicesJoinedError, Joined
from moreh_ap.session.planning import machine_profile as machines
from moreh_ap.session.planning.device_rates import as_entry, rates_of
from moreh_ap.session.planning.machine_profile import _link, machine_from, machine_of, machine_on, machine_with
from moreh_ap.settings import Options
from unit.session.planning.samples import GIB, rates

CPU = DeviceInfo("CPU", 4 * GIB, True, 1, 2)


def test_a_product_of_the_lengths_that_were_measured_takes_what_was_measured():
    found = machine_from(CPU, "fp32", 2, rates())
    device, constants = found.cluster.device, found.coefficients

    def rate(tokens: int, width: int) -> float:
        return device.peak_flops("fp32") / (1 + constants.half_tokens / tokens) / (1 + constants.half_width / width)

    assert rate(1024, 1024) == pytest.approx(2e11)
    assert rate(64, 1024) == pytest.approx(1e11)
    assert rate(1024, 64) == pytest.approx(1.6e11)


def test_half_a_rate_is_reached_at_the_length_that_explains_both():
    assert machines._half(1.0, 64, 1024) == 0.0
    assert machines._half(0.7, 64, 1024) == 0.0, "a short product that is no slower needs no length"
    half = machines._half(2.0, 64, 1024)
    assert (1 + half / 64) / (1 + half / 1024) == pytest.approx(2.0)
    assert machines._half(1000.0, 64, 1024) > 0.0, "slower than any such length explains"


def test_the_plan_s_precision_decides_which_rates_count():
    single, half = (machine_from(CPU, precision, 2, rates()) for precision in ("fp32", "bf16"))
    assert half.cluster.device.peak_flops("bf16") == pytest.approx(5 * single.cluster.device.peak_flops("fp32"))
    without = replace(rates(), products=tuple(row for row in rates().products if row[0] == "fp32"))
    assert machine_from(replace(CPU, native_bf16=False), "bf16", 2, without) == machine_from(
        replace(CPU, native_bf16=False), "fp32", 2, without
    )


def test_workers_that_share_cores_have_a_part_of_each():
    two, four = (machine_from(CPU, "fp32", number, rates(sizes=(2, 4))) for number in (2, 4))
    for name in ("fp32_flops", "memory_bytes_per_s"):
        assert getattr(four.cluster.device, name) == pytest.approx(getattr(two.cluster.device, name) / 2)
    assert [one.cluster.device.sharing for one in (two, four)] == [1.0, 2.0]
    assert four.system.host_s_per_kernel == pytest.approx(2 * two.system.host_s_per_kernel)
    assert [rate for _, rate in four.cluster.device.elementwise] == [1e10, 1e10]


def test_an_exchange_takes_the_clock_s_time_or_where_cores_are_shared_the_processor_s():
    measured = rates(sizes=(2, 4))
    two, four = (machine_from(CPU, "fp32", number, measured) for number in (2, 4))
    pair, all_four = group_of(2, 1, two.cluster), group_of(4, 1, four.cluster)
    assert queued_sums_s(1e6, 1, pair) == pytest.approx(1.1e-3)
    assert queued_sums_s(1e6, 1, all_four) == pytest.approx(2 * 5.8e-4)
    assert queued_gathers_s(2e6, 2, pair) == pytest.approx(2 * 2 * 1.1e-3)
    assert queued_gathers_s(1e6, 1, pair, "scatter") == pytest.approx(3 * 1.1e-3)
    assert pipeline_messages(1e6, 1, two.cluster, two.coefficients, 2).slowest_s == pytest.approx(4 * 1.1e-3)
    assert tensor_sum_s(1e6, False, pair) == pytest.approx(5 * 1.1e-3 / 2)
    assert tensor_sum_s(1e6, True, pair) == pytest.approx(6 * 1.1e-3 / 2)


def test_what_an_exchange_took_beyond_the_work_of_its_members_was_other_programs():
    busy = replace(rates(), exchanges=tuple((*row[:3], 50 * row[4], row[4]) for row in rates().exchanges))
    cluster = machine_from(CPU, "fp32", 2, busy).cluster
    assert queued_sums_s(1e6, 1, group_of(2, 1, cluster)) == pytest.approx(2 * 5.8e-4)


def test_a_known_device_keeps_its_data_sheet_and_starts_operations_beside_computing():
    found = machine_from(DeviceInfo("NVIDIA H100 80GB HBM3", 79 * GIB, True), "bf16", 2, rates())
    assert found.cluster.device.name == "H100-80GB" and found.cluster.device.memory_bytes == 79 * GIB
    assert found.cluster.device.sharing == 1.0 and not found.cluster.device.elementwise
    host_s = MOREH_AP.host_s_per_kernel + machines.HOST_S_PER_OPERATION
    assert found.system == replace(MOREH_AP, host_s_per_kernel=host_s)
    assert machine_from(CPU, "fp32", 2, rates()).system.host_computes
    assert MOREH_AP_ON_CPU.hides_gradients == 0.0


class Outbox:
    """Answers a probe as workers would, and counts how often it is asked."""

    def __init__(self, answers: list[DeviceRates]) -> None:
        self.answers, self.asked = answers, []

    def submit(self, command: object) -> SimpleNamespace:
        self.asked.append(command)
        return SimpleNamespace(result=lambda: self.answers)


def session(outbox: Outbox, info: DeviceInfo = CPU, **options: object) -> SimpleNamespace:
    options = Options(devices=2, **options)
    return SimpleNamespace(devices=lambda: [info, info], outbox=outbox, options=options, hosts=options.hosts)


def test_a_machine_is_measured_once_by_all_workers(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    outbox = Outbox([rates(), rates(2.0)])
    first = machine_of(session(outbox))
    assert outbox.asked == [ProbeDevice(True)]
    assert first.cluster.device.fp32_flops == pytest.approx(
        machine_from(CPU, "fp32", 2, rates(2.0)).cluster.device.fp32_flops
    )
    assert machine_of(session(outbox)) == first and len(outbox.asked) == 1
    other = machine_of(session(outbox, replace(CPU, num_threads=2)))
    assert other.key != first.key and len(outbox.asked) == 2, "with other threads a worker has other rates"


def of_hosts(slower=1.0, between=100.0):
    """What a worker of two hosts with two workers each might have measured; links between hosts are slower."""
    inside = rates(slower, sizes=(2,))
    exchanges = [(*row[:3], row[3] * between, row[4]) for row in rates(slower, sizes=(2, 4)).exchanges]
    return replace(inside, between=tuple(exchanges))


def test_links_between_hosts_are_told_apart_from_those_inside():
    info = replace(CPU, num_cores=4)
    cluster = machine_from(info, "fp32", 4, of_hosts(), per_host=2).cluster
    assert (cluster.num_nodes, cluster.devices_per_node) == (2, 2)
    inside, across, everybody = (group_of(size, stride, cluster) for size, stride in ((2, 1), (2, 2), (4, 1)))
    assert queued_sums_s(1e6, 1, inside) == pytest.approx(1.1e-3)
    assert queued_sums_s(1e6, 1, across) == pytest.approx(100 * 1.1e-3)
    assert queued_sums_s(1e6, 1, everybody) == pytest.approx(100 * 1.1e-3)
    constants = machine_from(info, "fp32", 4, of_hosts(), per_host=2).coefficients
    neighbours, hosts, all_four = (
        pipeline_messages(1e6, distance, cluster, constants, members) for distance, members in ((1, 2), (2, 2), (1, 4))
    )
    assert neighbours.slowest_s == pytest.approx(4 * 1.1e-3)
    assert hosts.slowest_s == all_four.slowest_s == pytest.approx(100 * 4 * 1.1e-3)
    assert (all_four.inside, all_four.across) == (2, 1), "one of three boundaries is between the hosts"
    assert tensor_sum_s(1e6, False, everybody) == pytest.approx(100 * 5 * 1.1e-3 / 2)
    assert cluster.inter.bytes_per_s < cluster.intra.bytes_per_s / 10
    alone = machine_from(CPU, "fp32", 2, replace(of_hosts(), exchanges=()), per_host=1).cluster
    assert (alone.num_nodes, alone.devices_per_node) == (2, 1)


def test_hosts_are_measured_once_and_what_differs_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    one, other = replace(CPU, machine="one"), replace(CPU, machine="other", memory_bytes=2 * GIB)
    options = Options(devices=4, hosts=("a", "b"))
    outbox = Outbox([of_hosts(), of_hosts(), of_hosts(2.0), of_hosts(2.0)])
    here = SimpleNamespace(devices=lambda: [one, one, other, other], outbox=outbox, options=options, hosts="ab")
    found = machine_of(here)
    assert outbox.asked == [ProbeDevice(True, 2)]
    assert found.cluster.num_nodes == 2 and found.cluster.device.sharing == 1.0, "each machine has its cores"
    assert found.cluster.device.memory_bytes == 2 * GIB
    said = capsys.readouterr().out
    assert "slower than the fastest host: b at 50% of its rate" in said
    assert "sums between 2 hosts pass 8 MB/s" in said and "in a host" in said
    assert machine_of(here) == found and len(outbox.asked) == 1 and capsys.readouterr().out == ""
    together = SimpleNamespace(devices=lambda: [one] * 4, outbox=outbox, options=options, hosts="ab")
    assert machine_of(together).cluster.device.sharing == 2.0


def test_hosts_with_other_devices_are_named(capsys):
    gpu = DeviceInfo("NVIDIA H100 80GB HBM3", 79 * GIB, True)
    infos = [gpu, gpu, replace(gpu, name="NVIDIA A100-SXM4-80GB")] * 2
    machines._say_of_hosts(["a", "b"], [infos[0], infos[0], infos[2], infos[2]], [of_hosts()] * 4)
    said = capsys.readouterr().out
    machines._say_of_hosts(["a", "b"], [CPU] * 4, [of_hosts()] * 2 + [of_hosts(2.0)] * 2)
    assert not capsys.readouterr().out, "workers of one machine only look as if some were slow"
    assert "different devices (a: NVIDIA H100 80GB HBM3, b: NVIDIA A100-SXM4-80GB)" in said and "slower" not in said


@pytest.mark.parametrize("broken", ["", "[1]", "ours"])
def test_a_broken_file_is_measured_over(tmp_path, monkeypatch, broken):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    outbox = Outbox([rates(), rates()])
    key = machine_of(session(outbox)).key
    text = json.dumps({key: {"products": [["fp32"]]}}) if broken == "ours" else broken
    (tmp_path / "machine.json").write_text(text)
    machine_of(session(outbox))
    assert len(outbox.asked) == 2
    assert rates_of(json.loads((tmp_path / "machine.json").read_text())[key]) == rates()


def test_where_nothing_can_be_written_it_is_measured_once_in_a_process(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "file"))
    outbox = Outbox([rates(), rates()])
    machine_of(session(outbox)), machine_of(session(outbox))
    assert len(outbox.asked) == 1
    assert machine_on(session(outbox), 1) is not None, "what is left of these devices can be planned for"


def test_the_plan_s_precision_is_the_one_that_the_options_and_the_devices_leave(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    outbox = Outbox([rates(), rates()])
    gpu = replace(CPU, name="a GPU that nobody has heard of")
    single = machine_from(gpu, "fp32", 2, rates()).cluster.device.elementwise
    asked = replace(
        rates(), elementwise=tuple((*row[:2], row[2] * (2 if row[0] == "bf16" else 1)) for row in rates().elementwise)
    )
    outbox.answers = [asked, asked]
    assert machine_of(session(outbox, gpu)).cluster.device.elementwise != single
    assert machine_of(session(outbox, gpu, mixed_precision=False)).cluster.device.elementwise == single
    assert machine_of(session(outbox, gpu, plan=Plan.parse("replicate=2"))).cluster.device.elementwise == single
    on_cpu = machine_of(session(outbox)).cluster.device
    assert not on_cpu.native_bf16, "CPU workers are compared with one process on the CPU"
    low = machine_of(session(outbox, plan=Plan.parse("replicate=2,precision=bf16"))).cluster.device
    assert low.elementwise != on_cpu.elementwise


def test_memory_that_other_processes_hold_is_not_planned_with(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    gpu = DeviceInfo("a GPU that nobody has heard of", 100 * GIB, True)
    outbox = Outbox([rates(), rates()])
    shared = machine_of(session(outbox, replace(gpu, held_by_others_bytes=60 * GIB)))
    assert shared.cluster.device.memory_bytes == 40 * GIB
    assert shared.key == machine_of(session(outbox, gpu)).key, "what is remembered holds for the device, not the moment"
    with pytest.raises(PlanError, match=r"hold 95\.0 of the 100\.0 GiB of worker 0's a GPU that") as error:
        machine_of(session(outbox, replace(gpu, held_by_others_bytes=95 * GIB)))
    assert [line.partition(":")[0] for line in str(error.value).splitlines()[1:]] == ["Allowed", "Try", "See"]


def test_another_number_of_devices_has_what_was_measured_of_it_or_the_present_rates(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    outbox = Outbox([rates(sizes=(2, 4))])
    here = SimpleNamespace(devices=lambda: [CPU] * 4, outbox=outbox, options=Options(), hosts=())
    assert machine_on(here, 2) is None, "nothing is known yet"
    four = machine_of(here)
    two = machine_on(here, 2)
    assert two.cluster.num_devices == 2 and len(here.outbox.asked) == 1, "nothing is measured for it"
    expected = machine_from(replace(CPU, native_bf16=False), "fp32", 2, rates(sizes=(2, 4)), two.key)
    assert two == expected
    assert two.cluster.device.fp32_flops == pytest.approx(2 * four.cluster.device.fp32_flops), "cores are not shared"
    assert machine_on(here, 3).cluster.intra.latency_s > 0, "its sums are those of the nearest number"
    assert machine_on(here, 8) is None, "more devices than there are workers"
    machines.FILE.keep(two.key, as_entry(rates(7.0)))
    assert machine_on(here, 2).cluster.device.fp32_flops == pytest.approx(two.cluster.device.fp32_flops / 7)
    fewer = SimpleNamespace(devices=lambda: [CPU] * 2, outbox=here.outbox, options=Options(), hosts=())
    assert machine_on(fewer, 4) == four == machine_on(here, 4), "known from when all had workers"


def test_hosts_that_join_have_the_rates_of_the_present_ones_or_those_that_were_measured(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    here = SimpleNamespace(devices=lambda: [CPU] * 2, outbox=Outbox([rates()]), options=Options(), hosts=("a",))
    joined = DevicesJoinedError(Joined("b joined a.", 4, ("a", "b")))
    assert machine_with(here, 4, joined, "unknown") is None
    one = machine_of(here)
    two = machine_with(here, 4, joined, one.key)
    assert (two.cluster.num_nodes, two.cluster.devices_per_node) == (2, 2) and two.key != one.key
    assert two.cluster.device.fp32_flops == one.cluster.device.fp32_flops, "each host has its own cores"
    assert two.cluster.inter == two.cluster.intra, "the link is not known"
    joined.between = Speed(1.0, 1e3)
    over_link = machine_with(here, 4, joined, one.key)
    assert over_link.cluster.inter == Link("measured", 1e3, 0.5) and over_link.cluster.intra == two.cluster.intra
    joined.between = Speed(1e-9, 1e15)
    assert machine_with(here, 4, joined, one.key) == two, "no link is faster than what workers do with it"
    joined.between = Speed(1.0, 1e3)
    machines.FILE.keep(two.key, as_entry(of_hosts()))
    known = machine_with(here, 4, joined, one.key).cluster.inter
    assert 1e3 < known.bytes_per_s < two.cluster.inter.bytes_per_s, "what workers have measured together counts"


def test_a_link_of_which_one_size_was_measured_has_the_rate_of_that():
    """A machine can be so busy that a sum of a few bytes takes too long for larger ones to be tried."""
    link = _link([("sum", 2, 1 << 20, 0.5, 0.01)], 2, is_cpu=False, sharing=1.0)
    assert link.bytes_per_s == pytest.approx((1 << 20) / 0.5)
    assert link.latency_s == 0.0


def test_a_link_over_which_few_bytes_took_longer_than_many_has_the_rate_of_the_many():
    """On a busy machine: they passed 4,193,280,000 MB/s."""
    rows = [("sum", 2, 1 << 10, 0.6, 0.01), ("sum", 2, 1 << 20, 0.5, 0.01)]
    assert _link(rows, 2, is_cpu=False, sharing=1.0).bytes_per_s == pytest.approx((1 << 20) / 0.5)


H200 = DeviceInfo("NVIDIA H200", round(139.8 * GIB), True)


def rates_of_h200(part: float = 1.0) -> DeviceRates:
    """What an H200 is known to do, or a part of it."""
    products = [
        (precision, tokens, width, part * rate * (1.0 if tokens == width else 0.1))
        for precision, rate in (("bf16", 788e12), ("fp32", 51e12))
        for tokens, width in ((8192, 8192), (64, 8192), (8192, 64))
    ]
    elementwise = ((precision, 1000, part * 4.3e12) for precision in ("bf16", "fp32"))
    return DeviceRates(tuple(products), tuple(elementwise), 8e-6, part * 3e12, (), ())


GPT2 = TransformerShape(12, 768, 3072, 12, 12, 64, 50257, tied=True, gated=False, biases=True, learned_positions=1024)
WIDE = TransformerShape(8, 4096, 14336, 32, 8, 128, 128256)


@pytest.mark.parametrize(
    ("shape", "rows", "length", "least_s", "most_s"),
    [
        (GPT2, 8, 1024, 0.048, 0.066),  # FSDP2 with compiled blocks, and this package
        (GPT2, 8, 512, 0.048, 0.086),
        (WIDE, 1, 8192, 0.264, 0.346),
    ],
)
def test_steps_on_an_h200_take_what_was_measured(shape, rows, length, least_s, most_s):
    for part in (1.0, 0.2):  # beside other programs; the device is known
        machine = machine_from(H200, "bf16", 1, rates_of_h200(part))
        habits = machine.cluster, machine.system, machine.coefficients
        found = estimate_step(profile_of(shape, length), Plan(precision="bf16"), rows, *habits)
        assert 0.8 * least_s < found.total_s < 1.35 * least_s and found.total_s < 1.1 * most_s

"""The catalogue of devices and links: every figure has a source, names are found, clusters are what a text says."""

from __future__ import annotations

import doctest
import re

import pytest

from moreh_ap.errors import OptionError
from moreh_ap.planner.cost import hardware
from moreh_ap.planner.cost.hardware import devices, find_cluster, find_device, find_link, links


def test_every_figure_has_a_source():
    for one in (*devices(), *links()):
        assert "https://" in one.source, one.name
        assert re.fullmatch(r"\d{4}-\d\d-\d\d|not fetched", one.checked), one.name


def test_figures_are_those_of_one_device():
    for device in devices():
        assert 1e13 < device.bf16_flops < 1e16, device.name
        assert device.fp32_flops <= device.bf16_flops, device.name
        assert 8 * 2**30 < device.memory_bytes < 300 * 2**30, device.name
        assert 2e11 < device.memory_bytes_per_s < 1e13, device.name
        assert 0.2 <= device.sustained <= 0.9, device.name
        find_link(device.intra)
        find_link(device.inter)


def test_a_rack_has_a_card_for_each_device():
    """Nodes of 72 devices have as many cards; a link for a node of 4 or 8 would starve them."""
    for name, per_device in (("GB200", 50e9), ("GB300", 100e9), ("H100", 50e9)):
        cluster = find_cluster(name)
        share = cluster.inter.bytes_per_s / cluster.devices_per_node
        assert share == pytest.approx(per_device, rel=0.1), name


def test_no_two_devices_share_a_name():
    names = [name.lower() for device in devices() for name in (device.name, *device.aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("H100", "H100-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("nvidia a100-sxm4-40gb", "A100-40GB"),
        ("AMD Instinct MI250", "MI250"),
        ("Tesla V100", "V100-16GB"),
        ("geforce rtx 4090", "RTX 4090"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A10", "A10"),
    ],
)
def test_names_are_found_however_they_are_written(text, name):
    assert find_device(text).name == name


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(OptionError, match="H100") as caught:
        find_device("H10")
    assert "unknown" in caught.value.fact


def test_a_cluster_from_a_text():
    cluster = find_cluster("64xMI250")
    assert (cluster.num_devices, cluster.devices_per_node, cluster.num_nodes) == (64, 8, 8)
    assert find_cluster("2 x H100").devices_per_node == 2
    assert find_cluster("H100", num_devices=16, devices_per_node=4, inter="IB-NDR1").num_nodes == 4


@pytest.mark.parametrize("text", ["0xH100", "xH100x", ""])
def test_an_impossible_cluster_is_refused(text):
    with pytest.raises(OptionError):
        find_cluster(text)


def test_peaks_by_precision():
    h100, a100 = find_device("H100"), find_device("A100")
    assert h100.peak_flops("fp8") == pytest.approx(2 * h100.peak_flops("bf16"), rel=1e-3)
    assert a100.peak_flops("fp8") == a100.peak_flops("bf16") > a100.peak_flops("fp32")


def test_examples_in_docstrings():
    outcome = doctest.testmod(hardware)
    assert outcome.attempted > 0
    assert outcome.failed == 0

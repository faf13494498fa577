"""Models, devices and clusters with figures that are easy to reckon with."""

from __future__ import annotations

from dataclasses import replace

from moreh_ap.plan import Plan
from moreh_ap.planner.cost.coefficients import COEFFICIENTS
from moreh_ap.planner.cost.hardware import Cluster, Device, Link, find_cluster
from moreh_ap.planner.cost.step_time import estimate_step
from moreh_ap.planner.cost.training_systems import MOREH_AP, MOREH_AP_ON_CPU
from moreh_ap.planner.profiles.transformer_shape import TransformerShape, profile_of

TINY = profile_of(TransformerShape(8, 256, 768, 8, 4, 32, 2000), 128)
DEVICE = Device("CPU", 2**32, 1e12, 1e11, 1e10, sustained=1.0)
RING = Link("ring", 1e9, 1e-4)
SYSTEM = replace(MOREH_AP_ON_CPU, host_s_per_kernel=1e-5)


def step(plan: str, between: Link = RING, device: Device = DEVICE, system=SYSTEM, rows: int = 16, profile=TINY):
    found = Plan.parse(plan)
    cluster = Cluster(device, found.num_devices, found.num_devices, between, between)
    return estimate_step(profile, found, rows, cluster, system, replace(COEFFICIENTS, step_s=0.0))


LARGE = TransformerShape(32, 4096, 14336, 32, 8, 128, 128256, name="8B")
LARGE_PROFILE = profile_of(LARGE, 4096)
CLUSTER = find_cluster("64xH100")


def estimate(plan, rows=512, cluster=CLUSTER, system=MOREH_AP):
    return estimate_step(LARGE_PROFILE, plan, rows, cluster, system)


SMALL = TransformerShape(8, 1024, 4096, 16, 16, 64, 32000, name="small")
SMALL_PROFILE = profile_of(SMALL, 2048)

"""Chooses a plan from numbers. Pure: no processes, no devices, no torch.distributed, no engine."""

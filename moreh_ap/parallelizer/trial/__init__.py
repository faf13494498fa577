"""Forwards that only find something out, on a few rows: whether a call may be split, and what it reads and draws."""

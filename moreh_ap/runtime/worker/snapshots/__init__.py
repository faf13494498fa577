"""Copies of what a worker holds: what belongs to one, how it is written, and how another worker takes it over."""

"""Which plans are possible, which is best, and why."""

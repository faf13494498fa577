"""Command-line tools that look at the machine and its jobs from outside: `moreh-smi` and others."""

"""Whether a plan gives the numbers of one process, tried on a small copy of the script's model."""

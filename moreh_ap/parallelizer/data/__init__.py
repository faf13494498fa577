"""Data parallelism: sharded parameters, gradient sums, shares of mean losses, random numbers of the whole batch."""

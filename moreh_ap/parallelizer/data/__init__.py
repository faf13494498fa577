"""Data parallelism: sharded parameters, sums of gradients, rows gathered where they meet, recomputation."""

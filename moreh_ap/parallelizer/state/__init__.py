"""Parameters, gradients and optimizer state of which a worker holds a shard: loading, reading and saving them."""

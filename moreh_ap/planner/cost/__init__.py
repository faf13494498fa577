"""How much memory and time a training step takes under a plan."""

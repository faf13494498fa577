"""Training checkpoints: saved under one plan, loaded under any other."""

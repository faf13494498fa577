"""How the answers of a GPU's worker leave without the worker waiting for its GPU."""

"""How workers begin with what one process has imported for all of them."""

"""Programs for the shell. Each file reads its arguments and calls the package; nothing else may import them."""

"""Arguments and results that are objects: those that lead back to themselves, and those that a forward returns."""

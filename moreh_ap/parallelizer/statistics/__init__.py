"""Statistics that a forward takes of a batch: of all rows, of parts of them, in trials and in calls."""

"""Commands of a worker that are not part of every training step, one module a subject."""

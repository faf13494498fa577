"""One forward and backward of a model on one worker: unsplit, on a batch slice, in micro-batches, or in a pipeline."""

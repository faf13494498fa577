"""In which dtype a forward computes where that is not the dtype of the parameters."""

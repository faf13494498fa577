"""What a model costs: the shape of its layers, and profiles of known public models."""

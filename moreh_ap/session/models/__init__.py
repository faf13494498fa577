"""Models and optimizers that live on the workers, seen from the controller."""

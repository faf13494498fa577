"""The controller's side of models and optimizers on the workers."""

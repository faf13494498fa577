"""The controller's side: models as skeletons, calls as promises, optimizers that step on the workers."""

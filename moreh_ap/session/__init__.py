"""The controller's side of the accelerator: models as skeletons, calls as promises, optimizers as remote controls."""

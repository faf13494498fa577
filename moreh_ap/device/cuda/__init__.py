"""`torch.cuda` as a script sees it: one device that is all devices together."""

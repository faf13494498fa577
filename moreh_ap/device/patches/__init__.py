"""Every change that the one line makes to other people's modules: each file one subject, all of them undoable."""

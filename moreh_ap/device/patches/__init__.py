"""The patches of other libraries' modules: one file for each subject, all of them undoable."""

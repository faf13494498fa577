"""From a script's first call to a plan: profiling model and machine, asking the planner, watching the first steps."""

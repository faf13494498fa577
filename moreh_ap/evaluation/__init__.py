"""How far the planner's predictions are from measured runs, also of other programs. The planner must not know it."""

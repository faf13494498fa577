"""What a forward keeps in attributes for the next one: ``self.hidden = hidden``.

[Note: kept values]
In a split call each worker sets an attribute to its rows, or to its share of a sum, of what one device would have.
That does no harm while no forward reads it (weights of attention, a loss). A forward that reads it gets it as one more
argument: it is sliced as arguments are, is part of the split check, and gradients flow back through it to the call that
set it.
"""

from __future__ import annotations

PASSED_STATE = "attributes that earlier forwards have set"
"""The keyword under which they are passed, ``{path and name: value}``; no forward has an argument of that name."""

"""Which commands are sent to workers that replace lost ones, and from which copy of the state these go on."""

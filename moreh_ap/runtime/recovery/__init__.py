"""Other workers in place of those of which one was lost: what they are told, and how they take over."""

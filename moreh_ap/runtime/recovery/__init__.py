"""Workers that replace others of which one was lost: which commands they get, and how they take over."""

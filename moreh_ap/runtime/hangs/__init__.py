"""Workers that live and will never answer: how that is found, and what their stacks say."""

"""The report of a run: what was recorded of it, as JSON, and a page that is made from the JSON."""

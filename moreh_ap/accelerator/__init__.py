"""What the one line makes: devices, workers, session and replacements that together are one accelerator."""

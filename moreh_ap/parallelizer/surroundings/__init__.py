"""The process around a forward as its code finds it: devices by name, process groups, torch function modes."""

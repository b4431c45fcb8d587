"""Trains the embedded model; not part of the package. README.md says how."""

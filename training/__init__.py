"""Trains the embedded model; not part of the package."""

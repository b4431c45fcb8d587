"""Paged attention backends."""

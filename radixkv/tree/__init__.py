"""Radix tree of cached KV pages."""

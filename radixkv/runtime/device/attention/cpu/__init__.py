"""Batch-invariant paged attention on the CPU."""

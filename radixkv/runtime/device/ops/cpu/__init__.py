"""Batch-invariant torch operations on the CPU."""

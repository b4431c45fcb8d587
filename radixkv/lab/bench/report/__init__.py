"""Metrics, tables, charts and comparisons of runs."""

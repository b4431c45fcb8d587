"""Metrics, as Prometheus text and as a log."""

"""Measures a server: workloads, the load generator, and reports."""

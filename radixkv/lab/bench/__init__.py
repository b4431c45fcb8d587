"""Benchmarks of servers: workloads, load generator and reports."""

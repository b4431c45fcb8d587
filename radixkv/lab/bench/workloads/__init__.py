"""Workloads: classes that generate the sessions of a run."""

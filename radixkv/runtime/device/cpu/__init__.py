"""Execution of step plans on a CPU."""

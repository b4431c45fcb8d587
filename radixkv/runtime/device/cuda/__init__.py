"""Execution of step plans on a CUDA device."""

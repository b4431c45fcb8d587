"""Pools and host slots of a CPU."""

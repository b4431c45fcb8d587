"""Pools, host slots and staged copies of a CUDA device."""

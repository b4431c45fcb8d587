"""Triton kernels and matrix products on CUDA."""

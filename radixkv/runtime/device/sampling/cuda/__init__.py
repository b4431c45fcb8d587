"""Token sampling on CUDA with Triton kernels."""

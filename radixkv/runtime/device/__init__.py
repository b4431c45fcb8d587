"""Devices that execute step plans: the CPU and CUDA GPUs."""

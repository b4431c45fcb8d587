"""Adapters on CUDA: their matrices in slots of one memory, and products of many of them in one step."""

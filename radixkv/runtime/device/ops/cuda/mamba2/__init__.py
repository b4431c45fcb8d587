"""Layers of Mamba2 on CUDA, in Triton, beside what they share with gated delta nets."""

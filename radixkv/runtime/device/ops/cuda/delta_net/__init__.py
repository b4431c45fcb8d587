"""Gated delta nets on CUDA, in Triton."""

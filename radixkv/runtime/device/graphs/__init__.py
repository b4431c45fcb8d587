"""CUDA graphs of decode steps, and of the pieces between attentions of other steps."""

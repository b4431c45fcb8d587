"""Token sampling on the CPU with numpy and torch."""

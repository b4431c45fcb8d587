"""Weight formats of quantized checkpoints."""

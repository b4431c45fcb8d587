"""Adapters on the device: LoRA of the rows of a step, beside the products of the base model."""

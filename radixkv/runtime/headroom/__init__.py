"""The pages that an admission leaves free for the next tokens of running answers, by their expected lengths."""

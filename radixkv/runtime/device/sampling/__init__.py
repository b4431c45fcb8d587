"""Token sampling and logprobs."""

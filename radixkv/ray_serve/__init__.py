"""A Ray Serve application of several servers, with a request router that asks them what they have of a prompt."""

"""States in the tree, of recurrent layers or of windows: which of them are kept, and what requests go on from."""

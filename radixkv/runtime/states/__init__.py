"""States of recurrent layers in the tree: which of them are kept, and what requests go on from."""

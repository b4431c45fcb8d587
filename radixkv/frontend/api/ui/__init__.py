"""The page ``/ui``, and the routes that it reads the tree from."""

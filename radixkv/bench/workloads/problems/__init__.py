"""Generators of problems with checkable answers, on whose texts the embedded model was trained."""

"""Training of the embedded model, which is not part of the package; README.md explains how."""

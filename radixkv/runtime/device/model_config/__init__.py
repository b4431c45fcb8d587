"""Model configurations of the supported checkpoint families."""

"""The version of radixkv, which the build reads from this file, too."""

__version__ = "0.1.0"

"""The version of this package, for who compares, reports or stores it."""

__version__ = "0.1.0"

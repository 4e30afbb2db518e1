"""The version, alone in a file so that a build reads it without importing torch."""

__version__ = "0.1.0.dev0"

"""calstack: language models compiled ahead of time and served."""

__version__ = "0.1.0"

"""The operations plane: a listener of its own, for those who run the server."""

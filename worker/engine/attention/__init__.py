"""Paged attention: the step's metadata, the function that transformers' models call, and the backends that compute it."""

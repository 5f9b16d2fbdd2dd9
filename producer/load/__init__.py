"""Load tests against a running queue: ``headrace load``."""

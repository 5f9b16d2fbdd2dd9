"""The ``headrace`` command: a group whose subcommands are imported when they are called."""

from producer.cli.group import main

__all__ = ["main"]

"""Environment variables of options, named after the option as it is typed."""

from __future__ import annotations

import os

import click

PREFIX = "HEADRACE"
REPEATABLE = "repeatable, in the variable separated by spaces"  # in the help of an option that may be repeated


def variable(prefix: str, name: str) -> str:
    """``PREFIX_NAME``, for an option or a command."""
    return f"{prefix}_{name.lstrip('-').replace('-', '_').upper()}"


def name_variables(command: click.Command, prefix: str) -> None:
    """Let each option also be read from ``PREFIX_OPTION``, unless it has a variable of its own, and say so in its help.

    A group's commands have ``PREFIX_COMMAND_OPTION``. click's ``auto_envvar_prefix`` takes the names of Python parameters instead,
    which no user sees.
    """
    for option in command.params:
        if isinstance(option, click.Option):
            option.envvar = option.envvar or variable(prefix, max(option.opts, key=len))
            option.show_envvar = True
    if isinstance(command, click.Group):
        for name, subcommand in command.commands.items():
            name_variables(subcommand, variable(prefix, name))


def unknown_variables(command: click.Command, prefix: str) -> list[str]:
    """Names in the environment that begin with ``PREFIX_`` and that no option of the command reads, most likely typos."""
    known = {option.envvar for option in command.params}
    return sorted(name for name in os.environ if name.startswith(f"{prefix}_") and name not in known)

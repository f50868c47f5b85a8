"""The command line. Each command reads its options, calls one public function and shows what came of it.

Results go to standard output, everything else to standard error. Heavy imports wait until a command needs them.
"""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer

from pouf.cli._console import fail
from pouf.cli.adapt import adapt
from pouf.cli.bench import bench
from pouf.cli.demo import demo
from pouf.cli.evaluate import evaluate
from pouf.cli.figures import figures
from pouf.cli.predict import predict
from pouf.cli.report import report
from pouf.cli.review import review
from pouf.cli.search import search
from pouf.errors import Diverged, InputError

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
def options_of_all(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Turn a zero-shot model into a better classifier for your data, without a single label."""


for command in (demo, adapt, search, predict, evaluate, report, review, figures):
    app.command()(command)
app.add_typer(bench, name="bench")

INTERRUPTED = 130  # what a shell reports for Ctrl-C


def main() -> NoReturn:
    """Entry point: an error that the user can mend is one line and exit code 2, never a traceback."""
    try:
        code = app(standalone_mode=False) or 0
    except InputError as error:
        fail(str(error), 2)
    except Diverged as error:
        fail(str(error), 1)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        if error.format_message():  # a usage error of the command line itself; without words where help was shown
            fail(error.format_message(), 2)
        code = 2
    if code == INTERRUPTED:
        fail("interrupted; what a run learned so far is in its folder", code)
    sys.exit(code)

"""What the commands share: what their help looks like, options that take several values, and how a command ends."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer

from leap_rs._leap import LeapError

INTERRUPTED = 130


def application() -> typer.Typer:
    """A command to be, with plain help: boxes cut long option names at 80 columns."""
    return typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def expand(words: Sequence[str], several: Mapping[str, Callable[[str], bool]]) -> list[str]:
    """`--option A B` as `--option A --option B`, for the options of `several`.

    After such an option the first value is taken as it is, and each further word for which the option's function is
    true. It may not look like an option itself, and `--` ends everything.
    """
    expanded: list[str] = []
    option: str | None = None
    first = False
    for i, word in enumerate(words):
        if word == "--":
            return [*expanded, *words[i:]]
        name, equals, _ = word.partition("=")
        if name in several:
            option, first = name, not equals
        elif first:
            first = False
        elif option is not None and not word.startswith("-") and several[option](word):
            expanded.append(option)
        else:
            option = None
        expanded.append(word)
    return expanded


def looks_like(pattern: str) -> Callable[[str], bool]:
    """For `expand`: whether the whole word matches and is no file, so that a trace after such values stays a trace."""
    compiled = re.compile(pattern)
    return lambda word: compiled.fullmatch(word) is not None and not Path(word).exists()


@contextmanager
def progress_bar(doing: str, total: int, done: int = 0) -> Iterator[Callable[..., object]]:
    """A bar on stderr, where that is a terminal; what it gives is called for one more that is done, or for so many."""
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(doing), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(doing, total=total, completed=done)
        yield lambda *more: bar.advance(task, *more)


@contextmanager
def ending(command: str, describe: Callable[[LeapError], str] = str) -> Iterator[None]:
    """Ends a command: a `LeapError` is one line on stderr and status 1, Ctrl-C is status 130, a closed pipe is done.

    Output that cannot be written (a full disk behind `>`) is status 1 too.
    """
    try:
        yield
    except LeapError as error:
        print(f"{command}: {' '.join(describe(error).split())}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        print(f"{command}: interrupted", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        # The reader of a pipe (head, less) has gone: nothing is wrong, and Python must not complain when it flushes.
        sys.stdout = None
        raise typer.Exit(0) from None
    except OSError as error:
        sys.stdout = None
        about = error.filename or "the output cannot be written"
        print(f"{command}: {about}: {error.strerror or error}", file=sys.stderr)
        raise typer.Exit(1) from None

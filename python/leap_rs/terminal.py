"""The commands at a terminal: how each of them starts and ends, what help is like, options that take several values."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from leap_rs import signals

if TYPE_CHECKING:
    import typer

    from leap_rs._leap import LeapError

INTERRUPTED = 130


def start(command: str, module: str) -> NoReturn:
    """Runs the command whose `main` is in `module`, its imports included."""
    try:
        run(command, lambda: import_module(module).main())
    finally:
        # All is said; Python's own end takes a moment, and would answer Ctrl-C with a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def run(command: str, call: Callable[[], object]) -> NoReturn:
    """Runs a command to its end and exits: whatever ends it, that is one line on stderr and the status in its help."""
    _have_streams()
    try:
        with signals.obeyed():
            status = _status(command, call)
    except KeyboardInterrupt:
        status = _told(command, KeyboardInterrupt())
    raise _Ended(status)


class _Ended(SystemExit):
    """The end of a command that has told what ended it."""


def _status(command: str, call: Callable[[], object]) -> str | int | None:
    status: str | int | None = 0
    try:
        try:
            call()
        except SystemExit as end:
            status = end.code
            # typer makes this of Ctrl-C, and says nothing.
            if status == INTERRUPTED and not isinstance(end, _Ended):
                raise KeyboardInterrupt from None
        sys.stdout.flush()
    except (KeyboardInterrupt, OSError, UnicodeError) as error:
        return _told(command, error)
    return status


@contextmanager
def ending(command: str, describe: Callable[[LeapError], str] = str) -> Iterator[None]:
    """Ends a command: a `LeapError` is one line on stderr and status 1, a closed pipe is done.

    Output that cannot be written (a full disk behind `>`) is status 1 too.
    """
    import typer

    from leap_rs._leap import LeapError

    try:
        yield
    except LeapError as error:
        tell(command, describe(error))
        raise typer.Exit(1) from None
    except (OSError, UnicodeError) as error:
        raise typer.Exit(_told(command, error)) from None


def tell(command: str, text: str) -> None:
    """One line on stderr, where there is anybody to read it."""
    with suppress(OSError):
        print(f"{command}: {' '.join(text.split())}", file=sys.stderr, flush=True)


def print_json(document: object) -> None:
    """One JSON object on stdout, in ASCII, which every locale has."""
    print(json.dumps(document, allow_nan=False), flush=True)


def _told(command: str, error: BaseException) -> int:
    """Tells what ended a command, and gives its status."""
    if isinstance(error, KeyboardInterrupt):
        tell(command, "interrupted")
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        # The reader of a pipe (head, less) has gone, and nothing is wrong.
        _silence()
        return 0
    if isinstance(error, OSError):
        _silence()
        tell(command, f"{error.filename or 'the output cannot be written'}: {error.strerror or error}")
    elif isinstance(error, UnicodeEncodeError):
        tell(
            command,
            f"{error.object[:200]}: holds bytes that are no UTF-8, and a name or text of them cannot be used here",
        )
    else:
        tell(command, str(error))
    return 1


def _silence() -> None:
    """Has what is still to be written go nowhere: Python would try once more as it ends, and complain."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class _Output(TextIOWrapper):
    """Stdout, which ends the command well when its reader has gone: typer would call that a fault of its own."""

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except BrokenPipeError:
            self._gone()

    def flush(self) -> None:
        try:
            super().flush()
        except BrokenPipeError:
            self._gone()

    def _gone(self) -> NoReturn:
        _silence()
        raise SystemExit(0) from None


def _have_streams() -> None:
    """Streams that are closed lead nowhere, and what an encoding has no sign for is a question mark on stdout."""
    # Else the next file that is opened would be what somebody means by stdout.
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    if sys.stderr is None:
        sys.stderr = open(2, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(1, "w", errors="replace", closefd=False)  # noqa: SIM115
    elif (out := sys.__stdout__) is not None and sys.stdout is out:
        out.flush()
        sys.stdout = _Output(out.buffer, out.encoding, "replace", None, out.line_buffering, out.write_through)


def application() -> typer.Typer:
    """A command to be, with plain help: boxes cut long option names at 80 columns."""
    import typer

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
def status(doing: str) -> Iterator[None]:
    """Says on stderr, where that is a terminal, what takes its time."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(doing):
        yield


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

"""The entry points of the commands: nothing is imported before Ctrl-C has its one line."""

import sys


def replay() -> None:
    """Entry point of `leap-replay`."""
    _start("replay")


def fit() -> None:
    """Entry point of `leap-fit`."""
    _start("fit")


def trace() -> None:
    """Entry point of `leap-trace`."""
    _start("trace")


def calibrate() -> None:
    """Entry point of `leap-calibrate`."""
    _start("calibrate")


def record() -> None:
    """Entry point of `leap-record`."""
    _start("record")


def _start(part: str) -> None:
    command = f"leap-{part}"
    try:
        from leap_rs import terminal
    except KeyboardInterrupt:
        print(f"{command}: interrupted", file=sys.stderr)
        sys.exit(130)
    terminal.start(command, f"leap_rs.{part}.command")

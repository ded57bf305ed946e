"""SIGTERM and SIGHUP end a command in order: what it has half written is removed, and its status says which it was."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_BEGIN_S = 1.0
"""How long Python may take to see a signal: not at all while the core or polars computes in its thread."""
_END_S = 30.0
"""How long the command may then take to end: an engine has to be stopped."""

_AGAIN_S = 0.05

_at_forks = False
_taken: set[signal.Signals] = set()
_fork = threading.local()


@contextmanager
def obeyed() -> Iterator[None]:
    """While it lasts SIGTERM and SIGHUP raise `SystemExit` with 128 + signal, and end the process where that does not.

    Ctrl-C is a `KeyboardInterrupt` as ever, but never lost.
    """
    # Whoever has a handler of their own, or started the command with nohup, means something by it.
    taken = [one for one in _SIGNALS if signal.getsignal(one) == signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread() or not taken:
        yield
        return
    main, begun, ended = threading.get_ident(), threading.Event(), threading.Event()

    def end(number: int, _frame: FrameType | None) -> None:
        # What is being tidied up is not to be interrupted by a second one.
        if not begun.is_set():
            begun.set()
            raise SystemExit(128 + number)

    def again(dropped: sys.UnraisableHookArgs) -> None:
        # It came up where Python lets nothing be raised: a destructor, or the clean-up of an import. Nor may it be
        # raised here.
        if isinstance(dropped.exc_value, KeyboardInterrupt):
            number = int(signal.SIGINT)
        elif isinstance(dropped.exc_value, SystemExit) and begun.is_set():
            number = int(str(dropped.exc_value.code)) - 128
            begun.clear()
        else:
            hook(dropped)
            return

        def repeat() -> None:
            if not ended.is_set():
                signal.pthread_kill(main, number)

        later = threading.Timer(_AGAIN_S, repeat)
        later.daemon = True
        later.start()

    def watch(told: int) -> None:
        while number := os.read(told, 1)[0]:
            if number in taken and not (begun.wait(_BEGIN_S) and ended.wait(_END_S)) and not ended.is_set():
                _end_at_once(number)

    hook, sys.unraisablehook = sys.unraisablehook, again
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    # Bytes come here from the signal itself, whatever the main thread is about.
    before = signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    _leave_alone_after_fork()
    watcher = threading.Thread(target=watch, args=(told,), name="leap-signals", daemon=True)
    watcher.start()
    _taken.update(taken)
    for one in taken:
        signal.signal(one, end)
    try:
        yield
    finally:
        ended.set()
        sys.unraisablehook = hook
        for one in taken:
            signal.signal(one, signal.SIG_DFL)
        _taken.clear()
        signal.set_wakeup_fd(before)
        with suppress(OSError):
            os.write(tell, b"\0")
        watcher.join()
        os.close(told)
        os.close(tell)


def _end_at_once(number: int) -> None:
    from leap_rs.writing import remove_unfinished

    remove_unfinished()
    os._exit(128 + number)


def _leave_alone_after_fork() -> None:
    global _at_forks  # noqa: PLW0603 — what is registered stays for good
    if not _at_forks:
        _at_forks = True
        os.register_at_fork(before=_hold, after_in_parent=_let, after_in_child=_as_by_default)


# A child's signals are its own. Until it has its own handlers they wait: they would come out at the parent.
def _hold() -> None:
    _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _taken)


def _let() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)


def _as_by_default() -> None:
    with suppress(ValueError):
        if _taken:
            signal.set_wakeup_fd(-1)
        for one in _taken:
            signal.signal(one, signal.SIG_DFL)
    _taken.clear()
    _let()

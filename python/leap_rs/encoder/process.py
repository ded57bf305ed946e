"""The process that reads prompts: `python -m leap_rs.encoder.process SETTINGS`, fed by `client.EncoderClient` over a pipe."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from leap_rs._leap import LeapError
from leap_rs.trace.files import reason

from . import frames
from .frames import Answer
from .model import Encoder
from .prompt_text import PromptText
from .source import EncoderInfo

NICE = 5
_PR_SET_PDEATHSIG = 1


def serve(settings: dict[str, Any], asked: BinaryIO, answers: BinaryIO) -> None:
    """Reads batches until there are no more."""
    encoder = Encoder.load(EncoderInfo(**settings["info"]), settings["threads"], settings["device"])
    texts = PromptText(_tokenizer(settings["tokenizer"]))
    frames.write_answer(answers, Answer.READY)
    while True:
        prompts = frames.read_prompts(asked)
        start = time.monotonic()
        for places, rows in encoder.parts([texts.text(ids.tolist()) for ids in prompts]):
            now = time.monotonic()
            frames.write_answer(answers, Answer.ROWS, frames.pack_rows(places, rows, now - start))
            start = now


def _tokenizer(source: str) -> Any:
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(source, local_files_only=True)
    except Exception as error:
        raise LeapError(f"{source}: its tokenizer cannot be loaded: {reason(error)[:300]}") from error


def _settle() -> None:
    """A place of its own beside the engine: it gives way, ends with it, and is not bound to the engine's cores."""
    os.nice(NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with suppress(OSError):
        os.sched_setaffinity(0, _allowed())


def _allowed() -> set[int]:
    """The cores of the parent's widest thread: an engine binds some of its threads, and children inherit that."""
    found = os.sched_getaffinity(0)
    for task in Path(f"/proc/{os.getppid()}/task").glob("[0-9]*"):
        with suppress(OSError):
            found |= os.sched_getaffinity(int(task.name))
    return found


def main() -> None:
    """Entry point of the process."""
    _settle()
    answers = os.fdopen(os.dup(1), "wb")
    # What libraries print goes where their log goes.
    os.dup2(2, 1)
    try:
        serve(json.loads(sys.argv[1]), sys.stdin.buffer, answers)
    except EOFError:
        pass
    except LeapError as error:
        frames.write_answer(answers, Answer.FAILED, str(error).encode())
    except Exception as error:
        frames.write_answer(answers, Answer.FAILED, f"{type(error).__name__}: {reason(error)[:300]}".encode())


if __name__ == "__main__":
    main()

"""Broken JSON traces, each with the words that its error must hold."""

from __future__ import annotations

import json

from bench_results import SUMMARY, detailed

MOONCAKE = b'{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n'
GMI = b'{"timestamp": "1753694362340138614", "input_length": 70, "output_length": 14, "hash_ids": [9, 8]}\n'
PULSE = (
    b'{"timestamp": "82", "input_length": 70, "output_length": 14, "hash_ids": {"history": []}, "session_id": "a"}\n'
)
BAILIAN = (
    b'{"chat_id": 7, "parent_chat_id": -1, "timestamp": 0.25, "input_length": 20, "output_length": 4, "type": "text", '
    b'"turn": 1, "hash_ids": [3, 4]}\n'
)
BENCH = json.dumps(detailed()).encode()

_LENGTH = "expected a whole number of tokens up to 4294967295, found"


def _second(line: bytes, old: bytes, new: bytes) -> bytes:
    """The line, and behind it the line with a fault."""
    assert line.count(old) == 1
    return line + line.replace(old, new)


BROKEN_JSON: dict[str, tuple[bytes, str]] = {
    "two numbers in a field": (_second(MOONCAKE, b": 5", b": 2748 610"), "line 2: not valid JSON: expected ',' del"),
    "a key is missing": (
        MOONCAKE.replace(b'"output_length": 5, ', b""),
        "looks like Mooncake, but has no key output_length; it has timestamp, input_length, hash_ids",
    ),
    "a true length": (_second(MOONCAKE, b": 5", b": true"), f"line 2: key 'output_length': {_LENGTH} true"),
    "a negative length": (_second(MOONCAKE, b"600", b"-600"), f"line 2: key 'input_length': {_LENGTH} -600"),
    "half a token": (_second(MOONCAKE, b": 5", b": 5.5"), f"line 2: key 'output_length': {_LENGTH} "),
    "a length beyond 32 bits": (_second(MOONCAKE, b": 5", b": 4294967296"), f"{_LENGTH} 4294967296"),
    "a length of many digits": (_second(MOONCAKE, b": 5", b": 1" + b"0" * 5000), "line 2: not valid JSON"),
    "a length with an exponent": (
        _second(MOONCAKE, b": 5", b": 1e999999999"),
        f"line 2: key 'output_length': {_LENGTH}",
    ),
    "a length as text": (_second(MOONCAKE, b": 5", b': "5"'), f"line 2: key 'output_length': {_LENGTH} \"5\""),
    "NaN length": (_second(MOONCAKE, b": 5", b": NaN"), f"line 2: key 'output_length': {_LENGTH} NaN"),
    "no lengths": (MOONCAKE.replace(b": 5", b": null"), "no requests (1 row left out: no number of output tokens"),
    "NaN time": (_second(MOONCAKE, b'p": 0', b'p": NaN'), "line 2: key 'timestamp': expected a time in ms, 0 or later"),
    "an infinite time": (_second(MOONCAKE, b'p": 0', b'p": Infinity'), "line 2: key 'timestamp': expected a time"),
    "a negative time": (_second(MOONCAKE, b'p": 0', b'p": -0.5'), "line 2: key 'timestamp': expected a time in ms"),
    "a time as text": (_second(MOONCAKE, b'p": 0', b'p": "0"'), "line 2: key 'timestamp': expected a time in ms"),
    "a true time": (_second(MOONCAKE, b'p": 0', b'p": true'), "line 2: key 'timestamp': expected a time in ms"),
    "Unix nanoseconds for ms": (
        _second(MOONCAKE, b'p": 0', b'p": 1753694362340138614'),
        "line 2: key 'timestamp': 1753694362340138614 is no time in ms (it would be over a century); --unit says which",
    ),
    "a time with a huge exponent": (_second(MOONCAKE, b'p": 0', b'p": 1e999999'), "is no time in ms"),
    "times run backwards": (
        MOONCAKE.replace(b'p": 0', b'p": 1000') + MOONCAKE,
        "line 2: column 'timestamp': times run backwards, from 1 s to 0 s: --sort (sort=True)",
    ),
    "a block too many": (
        _second(MOONCAKE, b"[0, 1]", b"[0, 1, 2]"),
        "line 2: key 'hash_ids': 600 tokens need 2 blocks of 512, 3 given",
    ),
    "no blocks": (_second(MOONCAKE, b"[0, 1]", b"[]"), "line 2: key 'hash_ids': 600 tokens need 2 blocks of 512, 0"),
    "a negative block": (_second(MOONCAKE, b"[0, 1]", b"[-1, 1]"), "line 2: key 'hash_ids': expected block ids from 0"),
    "a huge block": (_second(MOONCAKE, b"[0, 1]", b"[18446744073709551616, 1]"), "line 2: key 'hash_ids': expected bl"),
    "a block as text": (_second(MOONCAKE, b"[0, 1]", b'["0", 1]'), "line 2: key 'hash_ids': expected a list of whole"),
    "a true block": (_second(MOONCAKE, b"[0, 1]", b"[true, 1]"), "line 2: key 'hash_ids': expected a list of whole"),
    "blocks as a number": (_second(MOONCAKE, b"[0, 1]", b"2"), "line 2: key 'hash_ids': expected a list of whole"),
    "a list for a line": (MOONCAKE + b"[1]\n", "line 2: expected a JSON object, found [1]"),
    "a number for a line": (MOONCAKE + b"\n\n7\n", "line 4: expected a JSON object, found 7"),
    "two objects in a line": (MOONCAKE + MOONCAKE[:-1] + MOONCAKE, "line 2: not valid JSON: expected nothing more at"),
    "a truncated last line": (
        MOONCAKE + MOONCAKE[:-12],
        "line 2: not valid JSON: it ends in the middle (the last line; is the file truncated?)",
    ),
    "not text": (MOONCAKE + MOONCAKE.replace(b'": 0', b'\xff": 0'), "line 2: not UTF-8 text"),
    "nested too deeply": (MOONCAKE + b"[" * 200_000 + b"\n", "line 2: not valid JSON"),
    "only failed requests": (MOONCAKE.replace(b": 5", b": 0"), "the trace holds no requests (1 row left out"),
    "gmi: a time of no nanoseconds": (
        GMI.replace(b"1753694362340138614", b"82"),
        "line 1: key 'timestamp': \"82\" is a string, but no Unix time in nanoseconds: give its unit with --unit",
    ),
    "gmi: a time that is no number": (
        _second(GMI, b"1753694362340138614", b"yesterday"),
        "line 2: key 'timestamp': expected a time in ns, 0 or later, found \"yesterday\"",
    ),
    "gmi: a time in other digits": (
        GMI + GMI.replace(b"1753694362340138614", "١٧٥٣٦٩٤٣٦٢٣٤٠١٣٨٦١٤".encode()),
        "line 2: key 'timestamp': expected a time in ns",
    ),
    "bailian: a chat that is text": (
        _second(BAILIAN, b": 7", b': "x"'),
        "line 2: key 'chat_id': expected a whole numb",
    ),
    "bailian: no parent": (_second(BAILIAN, b'"parent_chat_id": -1, ', b""), "line 2: key 'parent_chat_id' is missing"),
    "bailian: a block too many": (
        _second(BAILIAN, b"[3, 4]", b"[3, 4, 5]"),
        "line 2: key 'hash_ids': 20 tokens need 2 blocks of 16, 3 given",
    ),
    "bailian: no type": (_second(BAILIAN, b'"text"', b"null"), "line 2: key 'type': expected a string, found null"),
    "bench: only a summary": (
        json.dumps(SUMMARY).encode(),
        "only a summary (no input_lens, output_lens, ttfts, itls): ",
    ),
    "bench: two results": (BENCH + b"\n" + BENCH, "two results; choose with --run N or --join"),
    "bench: three results": (BENCH + BENCH + BENCH, "3 results; choose with --run N or --join"),
    "bench: truncated": (BENCH[:-30], "line 1: not valid JSON"),
    "bench: all failed": (json.dumps(detailed(errors=["a", "b", "c"])).encode(), "run 1: no request succeeded"),
    "text without a tokenizer": (
        b'[{"id": "1", "conversations": []}]',
        "holds text and not token counts: give --tokenizer FILE (a model's tokenizer.json)",
    ),
}

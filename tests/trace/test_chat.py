"""Data sets of text: token counts of the first exchange by a tokenizer that splits at spaces, so that words are tokens."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leap_rs._leap import ConfigError, TraceError
from leap_rs.trace import READERS, ReadOptions, chat, load, write_trace
from leap_rs.trace.opening import opened

Words = list[tuple[str, str]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's directory; its tokenizer cuts at 3 tokens, fills up to 8 and marks the start, none of which may count."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    model = Tokenizer(models.WordLevel({"<s>": 0, "<unk>": 1, "<pad>": 2}, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    model.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])  # type: ignore[assignment]
    model.enable_truncation(3)
    model.enable_padding(length=8, pad_id=2, pad_token="<pad>")
    directory = tmp_path_factory.mktemp("models") / "Tiny-Model"
    directory.mkdir()
    model.save(str(directory / "tokenizer.json"))
    return directory


def sharegpt(*conversations: Words) -> list[dict[str, Any]]:
    return [
        {"id": str(n), "conversations": [{"from": who, "value": words} for who, words in conversation]}
        for n, conversation in enumerate(conversations)
    ]


def lmsys(*conversations: Words) -> list[dict[str, Any]]:
    return [
        {
            "conversation_id": f"{n:032x}",
            "model": "vicuna-13b",
            "conversation": [{"content": words, "role": who} for who, words in conversation],
            "turn": len(conversation) // 2,
            "language": "English",
            "openai_moderation": [],
            "redacted": False,
        }
        for n, conversation in enumerate(conversations)
    ]


def alpaca(*entries: tuple[str, str, str]) -> list[dict[str, Any]]:
    return [dict(zip(("instruction", "input", "output"), entry, strict=True)) for entry in entries]


def as_list(path: Path, entries: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps(entries))


def as_lines(path: Path, entries: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def as_parquet(path: Path, entries: list[dict[str, Any]]) -> None:
    pl.DataFrame(entries).write_parquet(path, row_group_size=2)


WRITERS = [as_list, as_lines, as_parquet]
Write = Callable[[Path, list[dict[str, Any]]], None]


def lengths(path: Path, tokenizer: Path) -> list[tuple[int, int]]:
    return load(path, ReadOptions(tokenizer=tokenizer)).frame.select("prompt_tokens", "output_tokens").rows()


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(
    ("make", "user", "model", "name"),
    [(sharegpt, "human", "gpt", "sharegpt"), (lmsys, "user", "assistant", "lmsys-chat")],
)
def test_the_first_exchange_is_a_request(
    write: Write,
    make: Callable[..., list[dict[str, Any]]],
    user: str,
    model: str,
    name: str,
    tmp_path: Path,
    tokenizer: Path,
) -> None:
    entries = make(
        [(user, "one two three four"), (model, "a b c d e f g h i j")],
        [(user, "one"), (model, "a b"), (user, "two"), (model, "c"), (user, "three"), (model, "d")],
        [],
        [(user, "nobody answers")],
        [(model, "nobody asked")],
        [(user, " \n"), (model, "a")],
        [(user, "a"), (model, "")],
        [(model, "end of an answer"), (user, "and then"), (model, "so"), (user, "ok")],
        [("system", "be brief"), (user, "why not"), (model, "a b c")],
    )
    path = tmp_path / "data"
    write(path, entries)
    assert [reader.name for reader in READERS if reader.fit(opened(path)).whole] == [name]
    trace = load(path, ReadOptions(tokenizer=tokenizer))
    assert trace.format == name
    assert trace.frame.schema == {"arrival_s": pl.Float64, "prompt_tokens": pl.UInt32, "output_tokens": pl.UInt32}
    assert trace.frame.rows() == [(0.0, 4, 10), (0.0, 1, 2), (0.0, 2, 1), (0.0, 4, 3)]
    first = {as_list: "entry 3", as_lines: "line 3", as_parquet: "row 2"}[write]
    assert [str(out) for out in trace.left_out] == [
        f"5 rows left out: an empty or one-sided conversation (first: {first})"
    ]
    assert any("2 later answers in 1 conversation" in note for note in trace.notes)
    assert any("no arrival times" in line for line in trace.told())
    assert trace.metadata["tokenizer"] == "Tiny-Model"
    with pytest.raises(TraceError, match=rf"{first}: an empty or one-sided conversation, and strict refuses those"):
        load(path, ReadOptions(tokenizer=tokenizer, strict=True))
    write_trace(trace.frame, tmp_path / "t.parquet", **trace.metadata)
    assert load(tmp_path / "t.parquet").frame.equals(trace.frame)


@pytest.mark.parametrize("write", WRITERS)
def test_alpaca(write: Write, tmp_path: Path, tokenizer: Path) -> None:
    path = tmp_path / "data"
    write(
        path,
        alpaca(("Say it", "", "It is said"), ("Add up", "1 2 3", "6"), ("Nothing", "", ""), ("", "only this", "a")),
    )
    trace = load(path, ReadOptions(tokenizer=tokenizer / "tokenizer.json"))
    assert trace.format == "alpaca"
    assert trace.frame.select("prompt_tokens", "output_tokens").rows() == [(2, 3), (5, 1), (2, 1)]
    assert [out.count for out in trace.left_out] == [1]
    assert trace.metadata["tokenizer"] == "Tiny-Model"


def test_alpaca_without_inputs(tmp_path: Path, tokenizer: Path) -> None:
    as_lines(tmp_path / "data", [{"instruction": "Say it", "output": "It is"}])
    assert lengths(tmp_path / "data", tokenizer) == [(2, 2)]


@given(
    st.lists(
        st.lists(
            st.tuples(st.sampled_from(["human", "gpt", "system", "tool"]), st.text("ab \n", max_size=9)), max_size=6
        ),
        max_size=8,
    ),
    st.integers(1, 3),
)
def test_any_conversation_against_the_rule_in_words(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Path, drawn: list[Words], batch: int
) -> None:
    """All messages from the first that is no answer up to the first answer; a user must speak and the model answer."""
    expected = []
    for conversation in drawn:
        speakers = "".join(who[0] for who, _ in conversation)  # h, g, s, t
        start = len(speakers) - len(speakers.lstrip("g"))
        end = speakers.find("g", start)
        if end < 0:
            continue
        asked, answer = conversation[start:end], len(conversation[end][1].split())
        if answer and any(who == "human" and words.split() for who, words in asked):
            expected.append((sum(len(words.split()) for _, words in asked), answer))
    path = tmp_path_factory.mktemp("chat") / "t.json"
    as_lines(path, sharegpt([("human", "x"), ("gpt", "y")], *drawn))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat, "BATCH", batch)
        patch.setattr(chat, "PART_ROWS", batch)
        assert lengths(path, tokenizer) == [(1, 1), *expected]


def test_half_a_surrogate_pair_is_counted(tmp_path: Path, tokenizer: Path) -> None:
    as_list(tmp_path / "t.json", sharegpt([("human", "a \ud83d b"), ("gpt", "ü \udc00")]))
    assert lengths(tmp_path / "t.json", tokenizer) == [(3, 2)]


@pytest.mark.parametrize(
    ("entry", "what"),
    [
        ({"id": "1"}, "key 'conversations' is missing; the entry has id"),
        ({"conversations": "text"}, "key 'conversations': expected a list of messages, found \"text\""),
        ({"conversations": ["text"]}, "key 'conversations', message 1: expected an object, found \"text\""),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"value": "b"}]},
            "message 2: expected who speaks under 'from' or 'role'",
        ),
        ({"conversations": [{"from": "human"}]}, "message 1: key 'value' is missing; the entry has from"),
        ({"conversations": [{"from": "human", "value": 4}]}, "message 1: key 'value': expected text, found 4"),
        (["a", "b"], "an entry of another shape"),
        ("text", "an entry of another shape"),
        (None, "an entry of another shape"),
    ],
)
def test_an_entry_of_another_shape_is_left_out_and_counted(
    entry: Any, what: str, tmp_path: Path, tokenizer: Path
) -> None:
    path = tmp_path / "t.json"
    for write, place in ((as_list, "entry 2"), (as_lines, "line 2")):
        write(path, [*sharegpt([("human", "a"), ("gpt", "b")]), entry, entry])
        trace = load(path, ReadOptions(tokenizer=tokenizer))
        assert trace.frame.select("prompt_tokens", "output_tokens").rows() == [(1, 1)]
        assert [str(out) for out in trace.left_out] == [f"2 rows left out: an entry of another shape (first: {place})"]
        with pytest.raises(TraceError) as caught:
            load(path, ReadOptions(tokenizer=tokenizer, strict=True))
        assert str(caught.value).startswith(f"{path}: {place}: ")
        assert what in str(caught.value)


@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_messages_of_role_and_content_are_read_as_conversations(key: str, tmp_path: Path, tokenizer: Path) -> None:
    said = [("system", "be brief"), ("user", "why not"), ("assistant", "a b c"), ("user", "x"), ("assistant", "y")]
    messages: list[dict[str, Any]] = [{"role": who, "content": words} for who, words in said]
    # Parts, as APIs take them where images are among them.
    messages[1]["content"] = [{"type": "text", "text": "why"}, {"type": "image_url"}, {"type": "text", "text": "not"}]
    path = tmp_path / "t.jsonl"
    as_lines(path, [{key: messages}])
    trace = load(path, ReadOptions(tokenizer=tokenizer))
    assert trace.format == {"messages": "messages", "conversations": "sharegpt"}[key]
    assert trace.frame.select("prompt_tokens", "output_tokens").rows() == [(4, 3)]


@pytest.mark.parametrize("write", [as_lines, as_parquet])
def test_wildchat_has_a_row_a_question(write: Write, tmp_path: Path, tokenizer: Path) -> None:
    def said(who: str, words: str, second: int | None) -> dict[str, Any]:
        time = None if second is None else f"2024-03-01T10:00:{second:02}Z"
        return {"content": words, "role": who, "timestamp": time, "toxic": False}

    def talk(name: str, second: int, *messages: dict[str, Any]) -> dict[str, Any]:
        time = f"2024-03-01T10:00:{second:02}Z"
        return {"conversation_hash": name, "model": "m", "timestamp": time, "conversation": list(messages), "turn": 1}

    entries = [
        # The time of a conversation is that of its last answer.
        talk(
            "b",
            20,
            said("user", "one two", None),
            said("assistant", "a", 9),
            said("user", "x", 12),
            said("assistant", "b c", 20),
        ),
        talk("a", 5, said("user", "three", None), said("assistant", "d e f", None)),
        talk("c", 30, said("user", "nobody", None), said("assistant", "", 30)),
    ]
    path = tmp_path / "wild"
    write(path, entries)
    trace = load(path, ReadOptions(tokenizer=tokenizer))
    assert trace.format == "wildchat"
    # What came before a question in its conversation is part of its prompt.
    assert trace.frame.select("arrival_s", "prompt_tokens", "output_tokens", "session", "model").rows() == [
        (0.0, 1, 3, "a", "m"),
        (4.0, 2, 1, "b", "m"),
        (7.0, 4, 2, "b", "m"),
    ]
    assert [out.count for out in trace.left_out] == [1]


def test_a_tokenizer_is_needed_and_has_to_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.json"
    as_list(path, sharegpt([("human", "a"), ("gpt", "b")]))
    with pytest.raises(ConfigError, match=r"t\.json: .* give --tokenizer FILE \(a model's tokenizer\.json\)"):
        load(path)
    with pytest.raises(ConfigError, match="no such file"):
        load(path, ReadOptions(tokenizer=tmp_path / "missing.json"))
    with pytest.raises(ConfigError, match=r"tokenizer\.json: no such file"):
        load(path, ReadOptions(tokenizer=tmp_path))
    with pytest.raises(ConfigError, match=r"t\.json: not a tokenizer\.json"):
        load(path, ReadOptions(tokenizer=path))
    with pytest.raises(ConfigError, match="a unit"):
        load(path, ReadOptions(unit="ms"))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r'pip install "leap-rs\[text\]"'):
        load(path, ReadOptions(tokenizer=path))


def test_a_damaged_parquet_of_text_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    path = tmp_path / "t.parquet"
    as_parquet(path, lmsys(*[[("user", f"word {n} " * 50), ("assistant", "so")] for n in range(100)]))
    content = bytearray(path.read_bytes())
    content[50 : len(content) // 2] = bytes(len(content) // 2 - 50)
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"t\.parquet: the Parquet file is damaged"):
        load(path, ReadOptions(tokenizer=tokenizer))


def test_a_leap_trace_that_keeps_its_text_is_a_leap_trace(tmp_path: Path) -> None:
    frame = pl.DataFrame(
        {"arrival_s": [0.0], "prompt_tokens": [1], "output_tokens": [1], "instruction": ["a"], "output": ["b"]}
    )
    write_trace(frame, tmp_path / "t.parquet")
    assert load(tmp_path / "t.parquet").format == "leap"

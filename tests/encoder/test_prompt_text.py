"""What the user wrote, out of token ids: real and made-up tokenizers and chat templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from leap_rs.encoder.prompt_text import PromptText  # noqa: E402

SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION = {"role": "user", "content": "What is 2 + 2?"}
ANSWER = {"role": "assistant", "content": "It is 4."}
LAST = "And 3 + 3?\n\nBe quick, user: assistant waits – süß 寿司."
AGAIN = {"role": "user", "content": LAST}

LLAMA = """{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
CHATML = """{% if messages[0].role != 'system' %}<|im_start|>system
You are helpful.<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
MISTRAL = """{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}

{% elif m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"""
# Nothing stands behind a question but what an answer begins with.
DEEP = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% elif m.role == 'system' %}\
{{ m.content }}{% else %}<|Assistant|>{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}<|Assistant|>{% endif %}"""
WORDS = """{% for m in messages %}{{ {'user': 'USER: ', 'assistant': 'ASSISTANT: ', 'system': 'SYSTEM: '}[m.role] }}{{ m.content }}
{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"""
TEMPLATES = {
    "llama-3": (LLAMA, ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]),
    "chatml": (CHATML, ["<|im_start|>", "<|im_end|>"]),
    "mistral, special": (MISTRAL, ["[INST]", "[/INST]"]),
    "mistral, plain": (MISTRAL, []),
    "deepseek": (DEEP, ["<|User|>", "<|Assistant|>"]),
    "vicuna": (WORDS, []),
}


def byte_tokenizer(template: str | None, special: list[str]) -> Any:
    """A token a byte, and the special ones. Templates' headers are no named special tokens, as in Llama 3."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(vocab={letter: place for place, letter in enumerate(alphabet)}, merges=[])
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>", *special])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def templated(tokenizer: Any, *messages: dict[str, str], generate: bool = True) -> list[int]:
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=generate)
    return list(tokenizer.encode(text, add_special_tokens=False))


@pytest.fixture(scope="module", params=["real", *TEMPLATES])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    if request.param == "real":
        return transformers.AutoTokenizer.from_pretrained(request.getfixturevalue("smollm"))
    return byte_tokenizer(*TEMPLATES[request.param])


@pytest.mark.parametrize("before", [(), (SYSTEM,), (QUESTION, ANSWER), (SYSTEM, QUESTION, ANSWER, QUESTION, ANSWER)])
@pytest.mark.parametrize("generate", [True, False])
def test_the_last_user_message(tokenizer: Any, before: tuple[dict[str, str], ...], generate: bool) -> None:
    ids = templated(tokenizer, *before, AGAIN, generate=generate)
    assert PromptText(tokenizer).text(ids) == LAST


def test_an_answer_that_has_begun(tokenizer: Any) -> None:
    ids = [*templated(tokenizer, AGAIN), *tokenizer.encode("Sure, it", add_special_tokens=False)]
    assert PromptText(tokenizer).text(ids) == LAST


@pytest.mark.parametrize("text", ["Once upon a time,", "def f(x):\n    return x", ""])
def test_a_prompt_without_the_template_is_read_whole(tokenizer: Any, text: str) -> None:
    prompts = PromptText(tokenizer)
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    assert prompts.text(ids) == text
    assert prompts.text([tokenizer.bos_token_id, *ids, tokenizer.eos_token_id]) == text


def test_a_message_that_was_cut_off(tokenizer: Any) -> None:
    words = " ".join(["word"] * 50)
    ids = templated(tokenizer, {"role": "user", "content": words})
    read = PromptText(tokenizer).text(ids[: -len(ids) // 3])
    assert len(read) > 50
    assert words.startswith(read.removesuffix("w"))


@pytest.mark.parametrize("template", [None, "{{ raise_exception('no') }}", "fixed", "{{ messages[0].content }}"])
def test_without_a_template_that_tells_messages_apart(template: str | None) -> None:
    tokenizer = byte_tokenizer(template, [])
    ids = tokenizer.encode("<s>All of it</s>, all.", add_special_tokens=False)
    assert PromptText(tokenizer).text(ids) == "All of it, all."


def test_a_tokenizer_of_words(minilm: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    assert PromptText(tokenizer).text(tokenizer.encode("Count to ten")) == "count to ten"

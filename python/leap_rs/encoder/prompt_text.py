"""The text of a prompt from its token ids: what the user wrote, without special tokens and the chat template."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

# Words that no template holds and that every tokenizer gives back as they are.
_QUESTION, _ANSWER, _AGAIN = "QUESTIONONE", "ANSWERONE", "QUESTIONTWO"


class PromptText:
    """Makes texts of prompts.

    Args:
        tokenizer: That of the model that is served. Where it has a chat template, what stands around a user's message is
            learnt from a conversation that is put through the template.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # The headers of a template are often special among the added tokens alone.
        added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        specials = sorted(added | {*tokenizer.all_special_tokens}, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, specials)) or r"(?!)")
        self._start, self._end = self._around()

    def text(self, token_ids: Sequence[int]) -> str:
        """The last user message of a conversation, or the whole text of what is none."""
        ids = list(token_ids)
        if self._start:
            whole = self._decode(ids)
            start = whole.rfind(self._start)
            if start >= 0:
                message = whole[start + len(self._start) :]
                if self._end:
                    message = message.partition(self._end)[0]
                return self._special.sub("", message).strip()
        return self._decode(ids, skip_special_tokens=True).strip()

    def _decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        return str(text)

    def _around(self) -> tuple[str, str]:
        """What stands before a user's message and what stands behind it; empty where there is no template."""
        if not getattr(self._tokenizer, "chat_template", None):
            return "", ""
        try:
            first, behind, between, last = self._pieces(generate=False)
            *_, prompt = self._pieces(generate=True)
        except Exception:
            # Templates are programs, and some refuse conversations that others take.
            return "", ""
        end = _common(behind, last).strip() or _common(behind, prompt).strip()
        start = "".join(reversed(_common_atoms(self._atoms(first)[::-1], self._atoms(between)[::-1]))).strip()
        return start.removeprefix(end).strip(), end

    def _pieces(self, *, generate: bool) -> list[str]:
        """What a templated conversation has around its three messages, as it comes back from tokens."""
        roles = {_QUESTION: "user", _ANSWER: "assistant", _AGAIN: "user"}
        messages = [{"role": role, "content": content} for content, role in roles.items()]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)
        whole = self._decode(self._tokenizer.encode(text, add_special_tokens=False))
        first, _, rest = whole.partition(_QUESTION)
        behind, _, rest = rest.partition(_ANSWER)
        between, found, last = rest.partition(_AGAIN)
        if not found:
            raise ValueError("the template leaves messages out")
        return [first, behind, between, last]

    def _atoms(self, text: str) -> list[str]:
        """The characters of a text, special tokens as one each."""
        return re.findall(f"{self._special.pattern}|.", text, re.DOTALL)


def _common(one: str, other: str) -> str:
    return "".join(_common_atoms(list(one), list(other)))


def _common_atoms(one: list[str], other: list[str]) -> list[str]:
    return [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]

"""Between text and tokens: prompts in, generated text out, where it may be cut and what of it is certain."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from mtp_extract.errors import PairError, escape
from mtp_extract.speculate.bounded import run_bounded
from mtp_extract.speculate.numbers import count

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_INCOMPLETE = "\ufffd"
_SECONDS, _A_SECOND = 10, 100
"""What a chat template may take, and how many prompts more it is to write in each further second."""


@dataclass(frozen=True)
class Encoded:
    """A prompt as the base is fed it."""

    tokens: tuple[int, ...]  # ids
    # who opened it with the base's BOS token: ``template``, ``tokenizer`` or ``prompt`` (its own text or ids); None
    # when it does not begin with one
    bos: str | None


Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Encoded
"""Text, token ids, or messages: dicts with ``role`` and ``content``."""


def _messages(prompt: Prompt, chat_template: bool) -> list[Any] | None:
    """The messages that the chat template is to write; None where it is not asked."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}] if chat_template else None
    if isinstance(prompt, Encoded) or not any(isinstance(part, Mapping) for part in prompt):
        return None
    return list(prompt)


class Codec:
    """The base's tokenizer as generation uses it; with None prompts are token ids, and results have no text."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size

    @property
    def has_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    def encode(self, prompt: Prompt, *, chat_template: bool = False) -> Encoded:
        """Token ids of ``prompt``; see :meth:`encode_all`."""
        return self.encode_all([prompt], chat_template=chat_template)[0]

    def encode_all(self, prompts: Sequence[Prompt], *, chat_template: bool = False) -> list[Encoded]:
        """Token ids of each of ``prompts``.

        Ids are taken as given, text as the tokenizer makes it or, with ``chat_template``, as what a user says in a
        chat; messages as the base's chat template writes them, and what begins the answer after them. A BOS token is
        there if the template or the tokenizer says so, and once.

        Raises:
            PairError: text without a tokenizer, messages without a template or such as it refuses, a template that
                does not come to an end, an empty prompt, or a token the base does not have.
        """
        chats = [_messages(prompt, chat_template) for prompt in prompts]
        written = iter(self._write([messages for messages in chats if messages is not None]))
        return [
            self._encoded(prompt, None if messages is None else next(written))
            for prompt, messages in zip(prompts, chats, strict=True)
        ]

    def _encoded(self, prompt: Prompt, written: str | None) -> Encoded:
        """Token ids of ``prompt``, or of what the template has ``written`` of it."""
        ids: Iterable[Any]
        if isinstance(prompt, Encoded):
            return prompt
        if written is not None:
            ids, writer = self._tokens(written, special=False), "template"
        elif isinstance(prompt, str):
            # A text that opens itself, as one that went through the template already, is not opened twice.
            bos = getattr(self.tokenizer, "bos_token", None) or ""
            opened = bool(bos) and prompt.startswith(bos)
            ids, writer = self._tokens(prompt, special=not opened), "prompt" if opened else "tokenizer"
        else:
            ids, writer = prompt, "prompt"
        tokens = tuple(self._check(ids))
        if not tokens:
            raise PairError("expected a prompt of at least one token, found an empty one; begin with the BOS token")
        return Encoded(tokens, writer if tokens[0] == getattr(self.tokenizer, "bos_token_id", None) else None)

    def continued(self, text: str) -> tuple[int, ...]:
        """Token ids of text that goes on after other text: nothing opens it.

        Raises:
            PairError: there is no tokenizer, or it makes a token that the base does not have.
        """
        return tuple(self._check(self._tokens(text, special=False)))

    def decode(self, tokens: Sequence[int], stop: Sequence[str] = ()) -> str | None:
        """Text of generated tokens, special tokens left out, up to the first stop string; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        text = self._text(tokens)
        return text[: min((text.find(end) for end in stop if end in text), default=len(text))]

    def ended(self, tokens: Sequence[int], stop: Sequence[str]) -> bool:
        """Whether the text of ``tokens`` holds a stop string."""
        text = self._text(tokens) if stop else ""
        return any(end in text for end in stop)

    def settled(self, tokens: Sequence[int], stop: Sequence[str] = ()) -> str:
        """The beginning of the text that no further token can change. ``tokens`` hold no stop string.

        A character may be spelled in several tokens. Where they are single bytes, a tokenizer shows a run of them as
        one thing, which the next byte may turn into another. And what could begin a stop string may not be text.
        """
        last = len(tokens)
        while last and tokens[last - 1] in self._open:
            last -= 1
        text = (self._text(tokens[:last]) if self.tokenizer is not None else "").rstrip(_INCOMPLETE)
        begun = (size for end in stop for size in range(1, len(end)) if text.endswith(end[:size]))
        return text[: len(text) - max(begun, default=0)]

    def special(self, text: str) -> int | None:
        """The id of the special token that is written ``text``; decoded text never holds one."""
        found = self._vocabulary.get(text)
        return found if found in self._special else None

    def require(self, what: str) -> None:
        """Raise :class:`PairError` when there is no tokenizer."""
        if self.tokenizer is None:
            raise PairError(
                f"expected a tokenizer for {what}, found none; pass the base's tokenizer, or token ids alone"
            )

    @cached_property
    def _vocabulary(self) -> Mapping[str, int]:
        return dict(self.tokenizer.get_vocab()) if hasattr(self.tokenizer, "get_vocab") else {}

    @cached_property
    def _special(self) -> frozenset[int]:
        """Tokens that text leaves out: those with a part to play (BOS, EOS, …), and those added as special."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {}).items()
        return frozenset(getattr(self.tokenizer, "all_special_ids", ())) | {n for n, token in added if token.special}

    @cached_property
    def _open(self) -> frozenset[int]:
        """Tokens after which the text before them is not settled: single bytes, and those that are not shown."""
        return self._special | {token for name, token in self._vocabulary.items() if _BYTE.fullmatch(name)}

    def _text(self, tokens: Sequence[int]) -> str:
        # A clean-up would take back spaces that a stream has given out.
        decode = self.tokenizer.decode
        return str(decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _tokens(self, text: str, *, special: bool) -> Iterable[Any]:
        self.require("a text prompt")
        ids: Iterable[Any] = self.tokenizer(text, add_special_tokens=special)["input_ids"]
        return ids

    def _write(self, chats: Sequence[Sequence[Any]]) -> list[str]:
        if not chats:
            return []
        self.require("messages")
        if not self.has_template:
            raise PairError(
                "expected a tokenizer with a chat template for messages, found one without; give the instruction-tuned "
                "base's tokenizer, or plain text"
            )
        for message in (message for messages in chats for message in messages):
            if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
                raise PairError(f"expected messages with role and content, found {escape(message)}")
        write = partial(self.tokenizer.apply_chat_template, add_generation_prompt=True, tokenize=False)
        try:
            return run_bounded(
                lambda: [write(list(messages)) for messages in chats], _SECONDS + len(chats) // _A_SECOND
            )
        except RuntimeError as error:
            reason = escape(str(error).split("\n")[0])
            raise PairError(
                f"expected messages that the base's chat template takes, found: {reason}; see which roles it knows, "
                "and in what order"
            ) from error

    def _check(self, ids: Iterable[Any]) -> Iterable[int]:
        for found in ids:
            token = count("a token", found, least=0)
            if token >= self._vocab_size:
                raise PairError(
                    f"expected tokens below {self._vocab_size}, found {token}; tokenize with the base's own tokenizer"
                )
            yield token

"""Between text and tokens, by the base's own tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

from mtp_extract.errors import PairError, escape

PromptInput = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or messages: dicts with ``role`` and ``content``."""

_TEXTS = ("text", "input_text", "output_text")  # types of parts that are text, in OpenAI's two APIs


def extract_text(content: Any) -> str:
    """Return the text of a message's ``content``: a string, a list of parts, or null (beside a tool call), which is "".

    Parts are joined by a line break, as vLLM and llama.cpp join them for a template that wants a string. Raise
    ValueError, which names the type, if a part is not text but an image, say.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise ValueError(f"content of type {type(content).__name__}, neither text nor a list of parts")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") in _TEXTS else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ValueError(f"content with a part that is no text but {escape(kind)}")
        texts.append(text)
    return "\n".join(texts)


class Codec:
    """Encode and decode with the base's tokenizer; without one, prompts are token ids and results have no text."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size

    @property
    def has_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    def encode(self, prompt: PromptInput, *, chat_template: bool = False) -> tuple[int, ...]:
        """Return the token ids of ``prompt``.

        Token ids stay as they are. Text gets the BOS token in front if the tokenizer does not add it; with
        ``chat_template`` it becomes a user's message, if the tokenizer has a template. Messages always go through it.

        Raises:
            PairError: text without a tokenizer, messages that the chat template does not take, an empty prompt, or a
                token that the base does not have.
        """
        if isinstance(prompt, str) and chat_template and self.has_template:
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, str):
            tokens = self.encode_continuation(prompt)
            bos = getattr(self.tokenizer, "bos_token_id", None)
            tokens = tokens if bos is None or tokens[:1] == (bos,) else (bos, *tokens)
        elif any(isinstance(part, Mapping) for part in prompt):
            tokens = self.encode_continuation(self._apply_template(prompt))
        else:
            tokens = self._check_ids(prompt)
        if not tokens:
            raise PairError("expected a prompt of at least one token, found an empty one; begin with the BOS token")
        return tokens

    def encode_continuation(self, text: str) -> tuple[int, ...]:
        """Return the token ids of text that continues other text, without a BOS token; PairError as :meth:`encode`."""
        if self.tokenizer is None:
            raise PairError("expected a tokenizer for text, found none; pass the base's tokenizer, or token ids")
        return self._check_ids(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str | None:
        """Return the text of generated tokens without special tokens; None without a tokenizer."""
        return None if self.tokenizer is None else str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _apply_template(self, messages: Sequence[Any]) -> str:
        if not self.has_template:
            raise PairError(
                "expected a tokenizer with a chat template for messages, found none. Give the instruction-tuned "
                "base's tokenizer, or plain text."
            )
        try:
            chat = [{**message, "content": extract_text(message.get("content"))} for message in messages]
            return str(self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
        except Exception as error:  # a template is a program and may raise anything
            reason = escape(str(error).split("\n")[0])
            raise PairError(f"expected messages that the base's chat template takes, found: {reason}") from error

    def _check_ids(self, ids: Sequence[Any]) -> tuple[int, ...]:
        tokens = tuple(map(index, ids))
        if unknown := [token for token in tokens if not 0 <= token < self._vocab_size]:
            raise PairError(
                f"expected tokens below {self._vocab_size}, found {unknown[0]}, which the base does not embed. Leave "
                "out text with that token, or give the base's own tokenizer."
            )
        return tokens

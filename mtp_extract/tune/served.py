"""The text a drafter is tuned on, where a server that has the base writes it: as it is served, many texts at once.

Texts are kept as those of the base at hand are, one a line, as they come; so a run that was interrupted goes on with
the rest. The server applies its own chat template and its own sampling. Whether its base is the one at hand is looked
at before anything is trained: of greedy text by the share of tokens that the base at hand would have written, of
sampled text by how likely it is to it, beside what that base writes itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from mtp_extract.errors import PairError, ServerError, escape
from mtp_extract.evaluate.prompts import Prompt
from mtp_extract.serving.answer import Answer
from mtp_extract.serving.client import Server, load
from mtp_extract.speculate.teacher import Text
from mtp_extract.tune.loss import LOGITS_AT_ONCE
from mtp_extract.tune.setting import Setting
from mtp_extract.tune.status import Status
from mtp_extract.tune.text import Tokens, Writing, stored_rows

LEAST_AGREEMENT = 0.9
"""Of greedy text: a base in four bits agrees with itself in sixteen at 0.93 to 0.97."""

MOST_SURPRISE = 0.25
"""Nats a token, of sampled text."""

_ARGUMENTS = {"key": "text_key", "model": "text_model", "timeout": "text_timeout", "concurrency": "text_concurrency"}
"""What a server's arguments are called in a setting."""

_LOOKED_AT = 32  # texts
_KEPT_AT_ONCE = 16  # texts


@dataclass(frozen=True)
class Served(Writing):
    """As :class:`~mtp_extract.tune.text.Writing`, by a server."""

    connect: Callable[[], Server] = field(kw_only=True)
    kind: str = field(kw_only=True)
    version: str | None = field(kw_only=True)
    model: str = field(kw_only=True)
    at_a_time: int = field(kw_only=True)
    unlike: bool = field(kw_only=True)  # whether texts of another base are taken

    @classmethod
    def of(cls, writing: Writing, setting: Setting) -> Served:
        """In place of ``writing``, by the server that ``setting`` names.

        Raises:
            MtpExtractError: it cannot be reached, or is no server of models.
        """
        url = setting.text_from
        assert url is not None

        def connect() -> Server:
            return Server(url, model=setting.text_model, key=setting.text_key, timeout=setting.text_timeout)

        with _arguments(), connect() as server:
            kind, version, model = server.kind.name, server.version, server.model
        same: dict[str, Any] = {one.name: getattr(writing, one.name) for one in fields(Writing)}
        return cls(
            **same,
            connect=connect,
            kind=kind,
            version=version,
            model=model,
            at_a_time=max(1, setting.text_concurrency // writing.share[1]),
            unlike=setting.text_unlike,
        )

    @property
    def author(self) -> str:
        return f"{self.kind}'s {escape(self.model)}"

    @property
    def _key(self) -> str:
        # Of the tokenizer that made tokens of the text the base at hand speaks.
        made_with = ["served", self.kind, self.model, self.fingerprint, self.new_tokens, self.temperature]
        return sha256(json.dumps([*made_with, self.chat_template]).encode()).hexdigest()[:16]

    def prepare(self, items: Sequence[Prompt | Tokens], tell: Callable[[Status], None] = lambda status: None) -> None:
        """Have written what is not stored yet, of this process's share; ``tell`` is called after every text.

        Raises:
            CheckpointError: a file of text is damaged.
            OutputError: the folder cannot be written.
            PairError: a prompt cannot be encoded, or does not fit the base's context.
            ServerError: the server does not answer as it should.
        """
        number, processes = self.share
        # Their length is looked at there.
        known = {prompt for _, batch in self._batches(items) for prompt in batch}
        encoded = zip(items, self._encoded(items), strict=True)
        # Tokens alone are continued by the base at hand.
        distinct = {prompt: (item, prompt) for item, prompt in encoded if isinstance(item, Prompt)}
        assert known == distinct.keys()
        mine, stored = list(distinct.values())[number::processes], self._stored()
        missing = [(item, prompt) for item, prompt in mine if self._name(prompt) not in stored]
        if missing:
            with _arguments(), self.connect() as server:
                self._ask_for(server, missing, len(mine), tell)

    def _ask_for(
        self, server: Server, missing: Sequence[tuple[Prompt, Tokens]], total: int, tell: Callable[[Status], None]
    ) -> None:
        waiting, done = list[Mapping[str, Any]](), 0

        async def ask(at: int) -> Answer:
            nonlocal done
            item, prompt = missing[at]
            seed = int(self._name(prompt)[:7], 16)
            more = {"temperature": self.temperature, "seed": seed, **server.kind.ids}
            answer = await server.answer(item.content, max_tokens=self.new_tokens, chat=self.chat_template, **more)
            waiting.append(self._line(prompt, answer))
            if len(waiting) >= _KEPT_AT_ONCE:
                self._keep(waiting)
                waiting.clear()
            done += 1
            tell(Status("text", total - len(missing) + done, total))
            return answer

        try:
            server.run(load(ask, len(missing), self.at_a_time))
        finally:
            if waiting:
                self._keep(waiting)

    def _line(self, prompt: Tokens, answer: Answer) -> Mapping[str, Any]:
        """What is stored of one answer.

        Thoughts are told without the marks around them, so nobody knows which tokens they were: then there is a text
        only where tokens are told.
        """
        tokens = answer.token_ids
        if tokens is None:
            tokens = () if answer.reasoning else self.generator.codec.continued(answer.text)
        return {
            "name": self._name(prompt),
            "prompt_length": len(prompt),
            "tokens": [*prompt, *self._known(tokens)],
            "text": answer.text,
            "tokens_told": answer.token_ids is not None,
            "prompt_tokens": answer.prompt_tokens,
        }

    def _known(self, tokens: Sequence[int]) -> Sequence[int]:
        """``tokens``, all of which the base has.

        Raises:
            PairError: one is beyond its vocabulary.
        """
        size = self.generator.base.vocab_size
        if (most := max(tokens, default=0)) >= size:
            raise PairError(
                f"expected {self.author} to write tokens below {size}, found {most}: it has another base. Name "
                "that one.",
                remedies=("base",),
            )
        return tokens

    def checked(self, items: Sequence[Prompt | Tokens]) -> Mapping[str, Any]:
        """Who wrote the texts, and how far that is the base at hand.

        Raises:
            PairError: it is another one.
        """
        rows = {row["name"]: row for path in self._paths() for row in stored_rows(path)}
        names = list(dict.fromkeys(self._name(prompt) for prompt in self._encoded(items)))
        mine = [rows[name] for name in names]
        texts = [Text(tuple(row["tokens"]), row["prompt_length"]) for row in mine]
        written = [text for text in texts if text.continuation]
        chosen = written[:: -(-len(written) // _LOOKED_AT) or 1]
        likely = list(self._likelihoods(chosen))
        positions = sum(len(hits) for hits, _ in likely)
        hits = sum(int(hits.sum()) for hits, _ in likely) / positions if positions else 0.0
        surprise = sum(float(excess.sum()) for _, excess in likely) / positions if positions else 0.0
        lengths = [row["prompt_tokens"] == row["prompt_length"] for row in mine if row["prompt_tokens"] is not None]
        greedy = self.temperature == 0
        found = {
            "kind": self.kind,
            "version": self.version,
            "model": self.model,
            "texts": len(chosen),
            "positions": positions,
            "agreement": round(hits, 4) if greedy and positions else None,
            "surprise": round(surprise, 4) if positions and not greedy else None,
            "prompts_alike": round(sum(lengths) / len(lengths), 4) if lengths else None,
            "tokens_told": round(sum(row["tokens_told"] for row in mine) / len(mine), 4),
        }
        another = hits < LEAST_AGREEMENT if greedy else surprise > MOST_SURPRISE
        if positions and another and not self.unlike:
            bound = f"at least {LEAST_AGREEMENT:.0%} of tokens" if greedy else f"at most {MOST_SURPRISE} nats a token"
            raise PairError(
                f"expected texts of the base at hand ({bound}), found others. {said_of(found)} Serve this base, with "
                "its own chat template, or name the one that is served.",
                remedies=("base", "text_unlike"),
            )
        return found

    @torch.no_grad()
    def _likelihoods(self, texts: Sequence[Text]) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each text's continuation, by token: whether the base would have written it; and by how much less likely it
        is, in nats, than what the base writes at this temperature on the mean."""
        base = self.generator.base
        rows = max(1, LOGITS_AT_ONCE // base.vocab_size)
        for text in texts:
            hidden = base.full_pass(torch.tensor([text.tokens], device=base.device)).hidden[0]
            before = hidden[text.prompt_length - 1 : -1]
            written = torch.tensor(text.continuation, device=base.device)
            found = []
            for part, tokens in zip(torch.split(before, rows), torch.split(written, rows), strict=True):
                logits = base.logits(part)
                likely = torch.log_softmax(logits / (self.temperature or 1.0), dim=-1)
                entropy = -(likely.exp() * likely).sum(-1)
                own = likely.gather(1, tokens[:, None])[:, 0]
                found.append((logits.argmax(-1) == tokens, -own - entropy))
            yield torch.cat([hits for hits, _ in found]), torch.cat([excess for _, excess in found])


@contextmanager
def _arguments() -> Iterator[None]:
    """Errors of a server inside name the arguments of a setting."""
    try:
        yield
    except ServerError as error:
        remedies = tuple(_ARGUMENTS.get(name, name) for name in error.remedies)
        raise ServerError(str(error), remedies=remedies) from None


def said_of(text_from: Mapping[str, Any]) -> str:
    """What :meth:`Served.checked` found, in a sentence."""
    who = f"{text_from['kind']}{' ' + escape(text_from['version']) if text_from['version'] else ''}"
    where = f"{text_from['positions']} tokens of {text_from['texts']} texts that {who} wrote"
    if text_from["agreement"] is not None:
        said = f"The base at hand would have written {text_from['agreement']:.1%} of {where}."
    elif text_from["surprise"] is None:
        said = f"There were {where}."
    else:
        said = (
            f"The {where} are {text_from['surprise']:+.3f} nats a token less likely to the base at hand than its own."
        )
    alike = text_from["prompts_alike"]
    if alike is not None and alike < 1:
        said += (
            f" Of the prompts {1 - alike:.1%} have another number of tokens there: its chat template is another one."
        )
    return said

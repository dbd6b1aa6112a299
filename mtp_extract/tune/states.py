"""What the base computes over texts, once: kept in memory as far as there is room, then on disk, else computed again.

Which texts share a forward of the base depends on nothing but the texts and the batch, so that the numbers are the
same, to the bit, wherever they are kept, and at whichever step a training resumes.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from xxhash import xxh3_128

from mtp_extract.drafter.protocol import KV, Needs
from mtp_extract.errors import CheckpointError, escape
from mtp_extract.speculate.target import Base
from mtp_extract.speculate.teacher import Text
from mtp_extract.tune.work import writing_to

_TOKENS_AT_ONCE = 256  # of short texts in one forward: of fewer it takes hardly less time
_MEMORY, _DISK = "memory", "disk"
_ALIGNED = 16  # every tensor of a file begins at a multiple of so many bytes
_DIGEST = 16  # bytes at a file's end


@dataclass(frozen=True)
class TextStates:
    """What the base computes over one text of L tokens."""

    text: Text  # the tokens
    hidden: Tensor  # [L, width], after the final norm
    shared_kv: Mapping[str, KV]  # layer type → K and V, each [KV heads, L, head_dim]
    layers: Mapping[int, Tensor]  # layer → [L, width], the state that enters it
    choices: Tensor  # int64 [L], the base's argmax after each token

    def on_host(self) -> TextStates:
        """The same in main memory."""
        return replace(
            self,
            hidden=self.hidden.cpu(),
            shared_kv={kind: (k.cpu(), v.cpu()) for kind, (k, v) in self.shared_kv.items()},
            layers={layer: states.cpu() for layer, states in self.layers.items()},
            choices=self.choices.cpu(),
        )


@torch.no_grad()
def states_of(base: Base, needs: Needs, texts: Sequence[Text], logits_at_once: int) -> list[TextStates]:
    """What ``base`` computes over ``texts`` in one forward, as far as ``needs`` asks for it; on its devices.

    Args:
        logits_at_once: most logits at a time (numbers, not bytes).
    """
    tokens = nn.utils.rnn.pad_sequence([torch.tensor(text.tokens) for text in texts], batch_first=True)
    full = base.full_pass(tokens.to(base.device), needs.layers)
    rows = max(1, logits_at_once // base.vocab_size)
    flat = full.hidden.flatten(0, 1)
    choices = torch.cat([base.logits(part).argmax(-1) for part in torch.split(flat, rows)]).view(tokens.shape)
    # Copies, so that what is kept of one text does not hold the whole pass.
    kinds = [(kind, *full.shared_kv[kind]) for kind in needs.shared_kv]
    return [
        TextStates(
            text,
            full.hidden[row, :length].clone(),
            {kind: (k[row, :, :length].clone(), v[row, :, :length].clone()) for kind, k, v in kinds},
            {layer: states[row, :length].clone() for layer, states in full.layers.items()},
            choices[row, :length].clone(),
        )
        for row, text in enumerate(texts)
        for length in [len(text.tokens)]
    ]


def token_bytes(needs: Needs, itemsize: int) -> int:
    """Bytes of the states over one token, where the base computes in numbers of ``itemsize`` bytes."""
    numbers = needs.width * (1 + len(needs.layers)) + sum(2 * heads * dim for heads, dim in needs.shared_kv.values())
    return numbers * itemsize + torch.long.itemsize


@dataclass(frozen=True)
class Room:
    """Where states may be kept."""

    memory: int = 0  # bytes, of the main memory
    disk: int = 0  # bytes in ``folder``
    folder: Path = Path()  # for nothing else; files of other states in it are removed
    fingerprint: str = ""  # of the base


class States:
    """The base's states over ``texts``.

    Args:
        needs: what the drafter reads of them.
        batch: most texts in one forward.
        room: what there is no room for is computed whenever it is asked for.
        logits_at_once: most logits at a time.

    Attributes:
        share: of the texts that are kept.
        sizes: place → bytes that are kept there.
    """

    def __init__(
        self, base: Base, needs: Needs, texts: Sequence[Text], batch: int, room: Room, logits_at_once: int
    ) -> None:
        self._base, self._needs, self._logits_at_once = base, needs, logits_at_once
        self._groups = list(_together(list(dict.fromkeys(texts)), batch))
        self._group_of = {text: number for number, group in enumerate(self._groups) for text in group}
        self._kept: dict[int, list[TextStates]] = {}
        self._place: dict[int, str] = {}
        dtype = base.model.get_input_embeddings().weight.dtype
        a_token = token_bytes(needs, dtype.itemsize)
        left = {_MEMORY: room.memory, _DISK: room.disk}
        for number, group in enumerate(self._groups):
            size = sum(len(text.tokens) for text in group) * a_token
            place = next((place for place, free in left.items() if size <= free), None)
            if place is not None:
                self._place[number], left[place] = place, left[place] - size
        self.sizes = {_MEMORY: room.memory - left[_MEMORY], _DISK: room.disk - left[_DISK]}
        kept = sum(len(self._groups[number]) for number in self._place)
        self.share = kept / max(1, len(self._group_of))
        made_by = f"{room.fingerprint} {dtype} {base.device} {torch.__version__} {transformers.__version__}"
        parts = repr((made_by, needs, [[text.tokens for text in group] for group in self._groups]))
        self._files = _Files(room.folder, sha256(parts.encode()).hexdigest()[:32], needs, dtype)

    def of(self, texts: Sequence[Text]) -> list[TextStates]:
        """Of each of ``texts``, all of which were given before.

        Raises:
            CheckpointError: a file of states is damaged.
            OutputError: one cannot be written.
        """
        numbers = dict.fromkeys(self._group_of[text] for text in texts)
        found = {item.text: item for number in numbers for item in self._group(number)}
        return [found[text] for text in texts]

    def forget(self) -> None:
        """Keep none any more, and remove the files."""
        self._kept.clear()
        self._files.remove()

    def _group(self, number: int) -> list[TextStates]:
        group, place = self._groups[number], self._place.get(number)
        if number in self._kept:
            return self._kept[number]
        if place == _DISK and (found := self._files.read(number, group)) is not None:
            return found
        items = states_of(self._base, self._needs, group, self._logits_at_once)
        if place is not None:
            items = [item.on_host() for item in items]
        if place == _MEMORY:
            self._kept[number] = items
        elif place == _DISK:
            self._files.write(number, items)
        return items


def _together(texts: Sequence[Text], batch: int) -> Iterator[list[Text]]:
    """Texts of similar length, as many as one forward takes; a long one alone, so that no other is computed with it."""
    group: list[Text] = []
    for text in sorted(texts, key=lambda text: len(text.tokens)):
        if group and (len(group) == batch or (len(group) + 1) * len(text.tokens) > _TOKENS_AT_ONCE):
            yield group
            group = []
        group.append(text)
    if group:
        yield group


class _Files:
    """States in files, one a group: the numbers of its texts, tensor by tensor, and at the end a digest of them."""

    def __init__(self, folder: Path, key: str, needs: Needs, dtype: torch.dtype) -> None:
        self._folder, self._key, self._needs, self._dtype = folder, key, needs, dtype
        self._begun = False

    def _path(self, number: int) -> Path:
        return self._folder / f"{self._key}-{number:05}.states"

    def read(self, number: int, group: Sequence[Text]) -> list[TextStates] | None:
        """What was written, mapped rather than read, or None.

        Raises:
            CheckpointError: it is not what was written.
        """
        path = self._path(number)
        ends = [0]
        for text in group:
            for dtype, shape in self._layout(len(text.tokens)):
                ends.append(ends[-1] + _aligned(dtype.itemsize * torch.Size(shape).numel()))
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                whole = size == ends[-1] + _DIGEST
                # Its own copy of a page that anyone writes to: a tensor is never read-only.
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if whole else None
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise self._damaged(path) from error
        if mapped is None or xxh3_128(memoryview(mapped)[:-_DIGEST]).digest() != mapped[-_DIGEST:]:
            raise self._damaged(path)
        places = iter(pairwise(ends))
        return [
            self._made(
                text,
                [
                    torch.frombuffer(mapped, dtype=dtype, count=torch.Size(shape).numel(), offset=first).view(shape)
                    for (dtype, shape), (first, _) in zip(self._layout(len(text.tokens)), places, strict=False)
                ],
            )
            for text in group
        ]

    def write(self, number: int, items: Sequence[TextStates]) -> None:
        """Keep ``items``: they are there whole or not at all.

        Raises:
            OutputError: they cannot be written.
        """
        path = self._path(number)
        # Of several processes each writes the same bytes, in a file of its own.
        part = path.with_suffix(f".{os.getpid()}.part")
        with writing_to(self._folder):
            if not self._begun:
                self._remove(others=True)
            digest = xxh3_128()
            with open(part, "wb") as file:
                for item in items:
                    for tensor in self._tensors(item):
                        piece = tensor.contiguous().flatten().view(torch.uint8).numpy().data
                        for data in (piece, bytes(_aligned(len(piece)) - len(piece))):
                            digest.update(data)
                            file.write(data)
                file.write(digest.digest())
            os.replace(part, path)

    def remove(self) -> None:
        """Leave nothing of these.

        Raises:
            OutputError: it cannot be removed.
        """
        if self._folder.is_dir():
            with writing_to(self._folder):
                self._remove(others=False)
                if not any(self._folder.iterdir()):
                    self._folder.rmdir()

    def _remove(self, *, others: bool) -> None:
        self._begun = True
        for path in self._folder.glob("*-*.*"):
            if path.suffix in (".states", ".part") and not (others and path.name.startswith(self._key)):
                path.unlink(missing_ok=True)

    def _layout(self, length: int) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        """Of a text of ``length`` tokens, each tensor as :meth:`_tensors` has them."""
        states = (self._dtype, (length, self._needs.width))
        kv = [(self._dtype, (heads, length, dim)) for heads, dim in self._needs.shared_kv.values() for _ in "kv"]
        return [(torch.long, (length,)), states, *[states] * len(self._needs.layers), *kv]

    def _tensors(self, item: TextStates) -> list[Tensor]:
        kv = [part for kind in self._needs.shared_kv for part in item.shared_kv[kind]]
        return [item.choices, item.hidden, *(item.layers[layer] for layer in self._needs.layers), *kv]

    def _made(self, text: Text, tensors: Sequence[Tensor]) -> TextStates:
        choices, hidden, *others = tensors
        layers, kv = others[: len(self._needs.layers)], iter(others[len(self._needs.layers) :])
        pairs = dict(zip(self._needs.shared_kv, zip(kv, kv, strict=True), strict=True))
        return TextStates(text, hidden, pairs, dict(zip(self._needs.layers, layers, strict=True)), choices)

    def _damaged(self, path: Path) -> CheckpointError:
        return CheckpointError(
            f"{escape(path)}: expected states of the base as they were kept, found others. Remove it to have them "
            "computed again."
        )


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED

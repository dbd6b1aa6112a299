"""Which anchors continue what training has seen, by looking."""

from __future__ import annotations

import pytest
import torch

from mtp_extract.evaluate.measured import Measured
from mtp_extract.speculate.teacher import Text
from mtp_extract.tuning.seen import seen, sequences


@pytest.mark.parametrize("steps", [1, 3, 7, 9])
def test_it_is_the_eight_tokens_around_the_drafts(steps: int) -> None:
    generator = torch.Generator().manual_seed(1)

    def drawn(length: int) -> Text:
        return Text(tuple(torch.randint(3, (length,), generator=generator).tolist()), 2)

    trained, texts = [drawn(60) for _ in range(40)], [drawn(length) for length in (30, 12, 50)]
    # What begins a text, and is shorter than eight, is seen where another begins with it.
    texts.append(Text((*trained[0].tokens[:6], *texts[0].tokens), 2))
    places = [(index, n) for index, text in enumerate(texts) for n in text.anchors if n + steps < len(text.tokens)]
    index, anchor = torch.tensor(places).T
    nothing = torch.zeros(len(places), steps, dtype=torch.double)
    found = seen(Measured.over(index, anchor, nothing), texts, sequences(trained))

    def stands(number: int, n: int) -> bool:
        last = n + min(steps, 7)
        tokens = texts[number].tokens[max(0, last - 7) : last + 1]
        if last < 7:
            return any(text.tokens[: last + 1] == tokens for text in trained)
        return any(text.tokens[at : at + 8] == tokens for text in trained for at in range(53))

    assert found.tolist() == [stands(number, n) for number, n in places]
    assert 0.1 < float(found.double().mean()) < 0.9
    assert not seen(Measured.over(index, anchor, nothing), texts, sequences(())).any()

"""Heads that give logits. The dense one is a linear layer; this is the other."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mtp_extract.architecture.config import DrafterConfig, OrderedHeadConfig

_ROWS_AT_ONCE = 1 << 18  # rows of the head in one piece: as many as a whole head of Gemma 4 has


class OrderedHead(nn.Module):
    """Logits for the tokens of the nearest centroids only; all others get one less than the least of those.

    ``token_ordering`` lists the tokens cluster by cluster. As in transformers the least logit is taken
    over the whole call, so the value of the *unselected* logits depends on what else is in the batch; the
    argmax does not.
    """

    def __init__(self, config: DrafterConfig, head: OrderedHeadConfig) -> None:
        super().__init__()
        self.head, self.vocab_size = head, config.vocab_size
        self.centroids = nn.Linear(config.hidden_size, head.num_centroids, bias=False)
        self.register_buffer("token_ordering", torch.zeros(config.vocab_size, dtype=torch.long))
        self.token_ordering: Tensor

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        nearest = self.centroids(x).topk(self.head.top_k, dim=-1).indices  # [B, L, k]
        tokens = self.token_ordering.view(self.head.num_centroids, -1)[nearest].flatten(-2)  # [B, L, k · V/C]
        at_once = max(1, _ROWS_AT_ONCE // tokens.shape[-1])
        parts = zip(torch.split(tokens.flatten(0, -2), at_once), torch.split(x.flatten(0, -2), at_once), strict=True)
        # Every query picks rows of its own, which many queries at once would not fit into memory.
        selected = torch.cat([(weight[rows] @ query[..., None]).squeeze(-1) for rows, query in parts])
        selected = selected.view(tokens.shape)
        rest = (selected.min() - 1.0).expand(*x.shape[:-1], self.vocab_size)
        return rest.scatter(-1, tokens, selected)

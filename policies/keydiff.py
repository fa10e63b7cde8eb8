"""KeyDiff: tokens whose key points away from the others matter."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.policy import Policy
from kvbench.contract.registry import register


@register("keydiff", source="arXiv:2504.15364")
@dataclass(frozen=True)
class KeyDiff(Policy):
    """Ranks tokens by how little their key resembles the mean direction of all keys of the head.

    s_i = -cos(k_i, mu) with mu the mean of k_j / |k_j|. This is the order of minus the summed
    pairwise cosines, at the cost of one pass.

    Shapes: score (batch, kv_head, slot) float32, minus a cosine, in [-1, 1]; a key of norm 0 gets 0.
    Source: arXiv:2504.15364, the efficient form; no official code, kvpress `KeyDiffPress`.
    Differs: mu is the mean of normalised keys, as in the paper's derivation (its cheaper mean of raw
    keys is another ranking). mu runs over all current slots, pinned ones included: the paper leaves
    that open, kvpress does the same. No window of its own: the paper's optional one is `--pins 0,N`.
    The paper evicts after every block of 128 tokens: `--schedule chunked --chunk 128`. kvpress
    computes in the dtype of the keys, here in fp32.
    """

    needs = frozenset({Need.KEYS})
    exactness = "paper"
    parity = "kvpress"
    ranking = "by ascending cosine to the mean normalised key"
    repeated = "mu is computed again from kept and new keys, so the kept set depends on the chunks"
    color = "#009E73"

    def score(self, seen: Observation) -> torch.Tensor:
        unit = torch.nn.functional.normalize(seen.keys.float(), dim=-1)
        mu = torch.nn.functional.normalize(unit.mean(2, keepdim=True), dim=-1)
        return -torch.matmul(unit, mu.transpose(-1, -2)).squeeze(-1)

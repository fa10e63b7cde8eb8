"""NACL: tokens that the last few attend to, mixed with a sample of the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.pins import Pins
from kvbench.contract.policy import Policy, param
from kvbench.contract.registry import register
from kvbench.errors import BadInput
from kvbench.policies.orders import gumbel, places


@register("nacl", source="arXiv:2408.03675")
@dataclass(frozen=True)
class NACL(Policy):
    """Ranks tokens in turn by the attention of the last tokens and by a sample weighted with it.

    s_i = sum of softmax(q k) over the queries of the last `proxies` share of the tokens read, over all
    slots, without causal mask, mean over the group. Two orders: by s, and by s + Gumbel noise, a sample
    without replacement with weights exp(s). Of every `top` + `drawn` tokens `top` are next in the first
    order and `drawn` in the second.

    Shapes: score (batch, kv_head, slot) float32, minus the turn in which the token comes; 1 for pinned
    ones.
    Source: arXiv:2408.03675; PaddlePaddle/Research `llama_nacl_patch.py`.
    Differs: the official code keeps 12% of the tokens by s and draws 7% from the rest; here any budget
    has both in that proportion, a token that is next in both orders once. Pins are 4 and 16 (ours); the
    official code keeps 256 sinks and 1% of the tokens less 256, which is negative below 25,600 tokens,
    and evicts above 2048 only. The paper's proxies are the question. A token's draw stays with it.
    """

    needs = frozenset({Need.KEYS, Need.WINDOW_QUERIES, Need.RANDOM})
    exactness = "official code"
    ranking = "pins, then 12 by attention for every 7 of the sample"
    repeated = "kept and new tokens are ranked by the last queries of the newest chunk, with their first draw"
    color = "#4B4B8F"

    proxies: float = param(0.01, "official proxy_tokens_ratio")
    top: int = param(12, "official proxy_token_keep_ratio, in percent")
    drawn: int = param(7, "official random_token_keep_ratio, in percent")
    sinks: int = param(4, "ours; official 256")
    recent: int = param(16, "ours; official 1% of the tokens, less the sinks")

    def __post_init__(self) -> None:
        if not 0 < self.proxies <= 1 or min(self.top, self.drawn) < 1 or min(self.sinks, self.recent) < 0:
            raise BadInput(
                f"nacl: proxies={self.proxies}, top={self.top}, drawn={self.drawn}, sinks={self.sinks}, "
                f"recent={self.recent}; use 0 < proxies <= 1, top and drawn >= 1, sinks and recent >= 0"
            )

    @property
    def pins(self) -> Pins:
        return Pins(first=self.sinks, last=self.recent)

    def score(self, seen: Observation) -> torch.Tensor:
        queries = seen.by_group(seen.window_queries(max(1, int(self.proxies * seen.seen)))).float()
        logits = (queries @ seen.keys[:, :, None].float().transpose(-1, -2)).mul(seen.scaling)
        received = logits.softmax(-1).sum(3).mean(2)  # (batch, kv_head, slot)
        pinned = (seen.positions < self.sinks) | (seen.positions >= seen.seen - self.recent)
        received = received.masked_fill(pinned, float("-inf"))  # pinned tokens take no turn
        best, sampled = (seen.slots - places(x) for x in (received, received + gumbel(seen.uniform())))
        turn = torch.minimum(best / self.top, sampled / self.drawn)
        return torch.where(pinned, 1.0, -turn)

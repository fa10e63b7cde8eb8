"""A window of last tokens that looks at the older slots alone, and that stays above them."""

from __future__ import annotations

import torch

from kvbench.contract.observation import Observation


def older_logits(seen: Observation, window: int, older: int) -> torch.Tensor:
    """Logits of the last `window` queries with the first `older` slots: (batch, kv_head, group, w, older)."""
    queries = seen.by_group(seen.window_queries(window)).float()
    keys = seen.keys[:, :, None, :older].float()
    return (queries @ keys.transpose(-1, -2)).mul(seen.scaling)


def under_window(older: torch.Tensor, seen: Observation) -> torch.Tensor:
    """Scores of the slots before a window, and the window's above them, the newest highest.

    older: (batch, kv_head, slot before the window). Returns (batch, kv_head, slot) float32.
    """
    window = seen.slots - older.shape[-1]
    top = older.amax(-1, keepdim=True) if older.shape[-1] else older.new_zeros(*older.shape[:2], 1)
    newer = torch.arange(1, window + 1, device=older.device, dtype=torch.float32)
    return torch.cat([older.float(), top.float() + newer], -1)

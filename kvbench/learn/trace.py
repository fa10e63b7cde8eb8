"""Traces: queries, keys and values of every layer of one forward pass, for training and offline study.

    DIR/traces.json                     model, geometry, dtype, how the traces were made
    DIR/index.jsonl                     one line per trace: id, tokens, context, shard
    DIR/shard-0003/layer-07.safetensors tensors "<trace>.q" (query_head, token, dim), ".k" and ".v"
                                        (kv_head, token, dim), memory-mapped: reading one KV head
                                        touches only its own bytes; ".h" (1, token, d_model) where hidden
                                        states were asked for

No attention matrix is stored; utilities are recomputed from queries and keys.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..contract.files import replace_file
from ..contract.identity import fingerprint
from ..contract.seen_text import SeenText
from ..errors import StoreError

HEADER, INDEX = "traces.json", "index.jsonl"
SHARD = 8  # traces per shard: the unit of resuming
TRACE_SCHEMA = 1


def draft_of(task: str, trace_id: str) -> str:
    """The sample behind a trace: its id is "SPEC|SAMPLE|CONTENT", and the spec names the length."""
    return f"{task}|{trace_id.partition('|')[2].rpartition('|')[0] or trace_id}"


@dataclass(frozen=True)
class TraceInfo:
    """One trace. tokens: its length; context: tokens before the question (the boundary split).

    scaling: the model's factor on attention logits. ids: the tokens; none in traces of before they
    were stored.
    """

    id: str
    tokens: int
    context: int
    task: str
    scaling: float
    shard: int = -1
    ids: tuple[int, ...] = ()

    @property
    def draft(self) -> str:
        """Equal for traces of one sample of a task at several lengths."""
        return draft_of(self.task, self.id)


@dataclass(frozen=True)
class Trace:
    """All full-attention layers of one trace, lazily: `layer(i)` of index i among them."""

    folder: Path
    info: TraceInfo

    def layer(self, index: int, heads: slice | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (query_head, token, dim), keys and values (kv_head, token, dim), as stored.

        heads: KV heads to read; their queries come with them.
        """
        file = self._file(index)
        if heads is None:
            q, k, v = (file.get_tensor(f"{self.info.id}.{name}") for name in "qkv")
            return q, k, v
        keys, queries = (file.get_slice(f"{self.info.id}.{name}") for name in "kq")
        group = queries.get_shape()[0] // keys.get_shape()[0]
        return (
            queries[heads.start * group : heads.stop * group],
            keys[heads],
            file.get_slice(f"{self.info.id}.v")[heads],
        )

    def hidden(self, index: int) -> Tensor:
        """What the attention module of a layer received: (token, d_model), as stored.

        Raises StoreError for traces without it.
        """
        name, file = f"{self.info.id}.h", self._file(index)
        if name not in file.keys():  # noqa: SIM118
            raise StoreError(
                f"{self.folder} holds no hidden states: make it again with kvbench trace --hidden"
            )
        found: Tensor = file.get_tensor(name)[0]
        return found

    def _file(self, index: int) -> Any:
        path = self.folder / f"shard-{self.info.shard:04d}" / f"layer-{index:02d}.safetensors"
        return _opened(str(path), path.stat().st_mtime_ns)


@lru_cache(maxsize=512)
def _opened(path: str, changed: int) -> Any:
    """A memory-mapped file, opened again when it has changed. Raises: StoreError when it is damaged."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise StoreError(f"{path} is damaged or cut off ({error}): make the traces again") from error


class TraceSet:
    """The traces of one folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            self.header: dict[str, Any] = json.loads((self.folder / HEADER).read_text())
            text = (self.folder / INDEX).read_text()
            whole = text[: text.rfind("\n") + 1]  # a killed process may leave half a line
            self.infos = [TraceInfo(**json.loads(line)) for line in whole.splitlines()]
        except OSError as error:
            raise StoreError(
                f"{folder} holds no traces: make them with kvbench trace --out {folder}"
            ) from error
        except (ValueError, TypeError) as error:
            raise StoreError(f"{folder} is broken ({error}): make the traces again") from error
        if self.header.get("schema", 0) > TRACE_SCHEMA:
            raise StoreError(f"{folder} was written by a newer kvbench: upgrade, or make the traces again")

    def __len__(self) -> int:
        return len(self.infos)

    def __iter__(self) -> Iterator[Trace]:
        return (Trace(self.folder, info) for info in self.infos)

    def __getitem__(self, index: int) -> Trace:
        return Trace(self.folder, self.infos[index])

    @property
    def identity(self) -> str:
        """Digits that differ between sets of traces."""
        return fingerprint([self.header, [asdict(info) for info in self.infos]])

    @property
    def seen_text(self) -> SeenText | None:
        """The text of all traces, for the weights that are learned from them; None where one has no ids."""
        texts = [info.ids for info in self.infos]
        return SeenText.of(texts) if texts and all(texts) else None

    @property
    def layers(self) -> int:
        """Number of full-attention layers stored."""
        return int(self.header["layers"])

    @property
    def kv_heads(self) -> int:
        return int(self.header["kv_heads"])

    @property
    def dim(self) -> int:
        return int(self.header["head_dim"])

    @property
    def has_hidden(self) -> bool:
        """Whether what attention modules received is stored."""
        return bool(self.header.get("hidden"))


class TraceWriter:
    """Appends shards to a folder; a killed process loses at most the shard in work."""

    def __init__(self, folder: str | Path, header: dict[str, Any]) -> None:
        self.folder = Path(folder)
        self.header = {"schema": TRACE_SCHEMA, **header}
        self._pending: list[tuple[TraceInfo, list[tuple[Tensor, ...]]]] = []
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / INDEX).touch()
            if (self.folder / HEADER).exists():
                self._check()
            else:
                text = json.dumps(self.header, indent=2) + "\n"
                replace_file(self.folder / HEADER, lambda draft: draft.write_text(text, encoding="utf-8"))
            data = (self.folder / INDEX).read_bytes()
            os.truncate(self.folder / INDEX, data.rfind(b"\n") + 1)
        except OSError as error:
            raise StoreError(f"cannot write to {folder} ({error.strerror}): choose another --out") from error
        self.done = TraceSet(self.folder).infos

    def _check(self) -> None:
        there = TraceSet(self.folder).header
        names = sorted(key for key in {*there, *self.header} if there.get(key) != self.header.get(key))
        if names:
            listing = "; ".join(f"{n}: {there.get(n)!r} there, {self.header.get(n)!r} asked" for n in names)
            raise StoreError(f"{self.folder} holds other traces ({listing}): use another --out")

    def add(self, info: TraceInfo, layers: Sequence[tuple[Tensor, ...]]) -> None:
        """Queue one trace; info.shard is set by the writer. layers: q, k, v, and h where it was recorded."""
        self._pending.append((info, list(layers)))
        if len(self._pending) == SHARD:
            self.flush()

    def flush(self) -> None:
        """Write the queued traces as one shard: tensors first, then their lines in the index."""
        if not self._pending:
            return
        shard = max((info.shard for info in self.done), default=-1) + 1
        folder = self.folder / f"shard-{shard:04d}"
        shutil.rmtree(folder, ignore_errors=True)  # left half written by a killed process
        try:
            folder.mkdir()
            for layer in range(len(self._pending[0][1])):
                tensors = {
                    f"{info.id}.{name}": tensor.contiguous()
                    for info, layers in self._pending
                    for name, tensor in zip("qkvh", layers[layer], strict=False)
                }
                save_file(tensors, folder / f"layer-{layer:02d}.safetensors")
            infos = [replace(info, shard=shard) for info, _ in self._pending]
            with open(self.folder / INDEX, "a", encoding="utf-8") as index:
                index.write("".join(json.dumps(asdict(info)) + "\n" for info in infos))
                index.flush()
                os.fsync(index.fileno())
        except (OSError, SafetensorError) as error:
            raise StoreError(
                f"cannot write traces to {self.folder} ({error}): free space, then resume"
            ) from error
        self.done += infos
        self._pending.clear()


def utilities(queries: Tensor, keys: Tensor, scaling: float, splits: Sequence[int]) -> list[Tensor]:
    """u of one layer at several split points of one trace.

    queries: (query_head, token, dim); keys: (kv_head, token, dim). splits: ascending, each in
    1..token-1; the future of split n is every token from n on. Returns per split (kv_head, n) float32:
    u_i = sum over the future of the max over the group of the full causal attention to token i.
    """
    from ..contract.attention_sums import streamed_sums

    ends = [*splits[1:], queries.shape[1]]
    parts = [
        streamed_sums(queries[None, :, start:end], keys[None, :, :end], scaling, start, "max")[0]
        for start, end in zip(splits, ends, strict=True)
    ]
    found = []
    for index, split in enumerate(splits):
        found.append(torch.stack([part[:, :split] for part in parts[index:]]).sum(0))
    return found

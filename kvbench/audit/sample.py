"""One sample of a run, whole: its prompt, the right answer, what every method answered and what it kept.

In: a run folder and the id of a sample. Out: lines of text. Answers and metrics are those of the rows; the
prompt is built again from task and data, and kept positions are found by ranking the prompt once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..contract.draws import draw_key
from ..contract.metrics import Metric, describe
from ..contract.registry import POLICIES, TASKS, expand_policies, expand_tasks, spec_of
from ..contract.task import Sample
from ..engine.kept import kept_positions
from ..errors import BadInput, KvbenchError
from ..model.open import LoadedModel, open_model
from ..model.prompt import Prompt
from ..show.words import as_words, number
from ..store.manifest import read_manifest, stored_metrics
from ..store.results import Row, stored_rows
from ..study.plan import plan_task
from ..study.workload import Workload
from .sources import settings_of

SIZES = ("nll_tokens", "kv_bytes")  # metrics that are the same for every policy
ENDS = 400  # characters of a long context that are shown at each end
RUN = 30  # and of the text of kept neighbours
RUNS = 24  # runs of kept neighbours that are shown


def show_sample(path: str | Path, sample: str, whole: bool = False, kept: bool = False) -> Iterator[str]:
    """The lines that `kvbench show` prints.

    whole: print all of the context and of what is kept, not their ends. kept: load the model and show what
    each policy keeps.
    Raises: BadInput for a sample that the run does not have, and as opening the model does.
    """
    stored = stored_rows(path)[0]
    rows = [row for row in stored if row.sample == sample]
    if not rows:
        known = list(dict.fromkeys(row.sample for row in stored))
        some = ", ".join(known[:5]) + (", ..." if len(known) > 5 else "")
        raise BadInput(f"--sample {sample}: not in {path}, whose {len(known)} samples are {some}")
    manifest = read_manifest(path)
    metrics = stored_metrics(manifest)
    loaded: LoadedModel | None = None
    for task in dict.fromkeys(row.task_spec for row in rows):
        own = [row for row in rows if row.task_spec == task]
        yield f"sample {sample} of {task}"
        try:
            found = list(_find(manifest, task, sample))
        except KvbenchError as error:
            yield f"its prompt cannot be built again: {error}"
            found = []
        if found:
            yield from _prompt(*found[0][1:], whole)
        yield from _answers(own, metrics)
        if kept:
            for work, item, prompt in found:
                if isinstance(prompt, Prompt):
                    loaded = loaded or work.opened.load()
                    yield from _kept(work, loaded, item, prompt, whole)
        yield ""


def _find(
    manifest: dict[str, Any], task: str, sample: str
) -> Iterator[tuple[Workload, Sample, Prompt | str]]:
    """The sample in the workloads of every setting of the run."""
    for config in settings_of(manifest):
        if task not in [spec_of(TASKS.parse(spec)) for spec in expand_tasks(config.tasks)]:
            continue
        opened = open_model(config.model, config.device, config.dtype)
        policies = [POLICIES.parse(spec) for spec in expand_policies(config.policies)]
        for one in config.of_each_seed():
            work = Workload.build(one, plan_task(one, TASKS.parse(task), policies), opened)
            for item, prompt in work.samples.items:
                if item.id == sample:
                    yield work, item, prompt


def _prompt(sample: Sample, prompt: Prompt | str, whole: bool) -> Iterator[str]:
    if isinstance(prompt, str):
        yield f"skipped: {prompt}"
        return
    text = sample.context
    if not whole and len(text) > 3 * ENDS:
        left_out = f"\n[... {len(text) - 2 * ENDS} characters; --whole prints them ...]\n"
        text = text[:ENDS] + left_out + text[-ENDS:]
    yield f"\ncontext, {len(prompt.context)} tokens:\n{text}"
    yield f"\nquestion{' (seen before eviction)' if prompt.asked else ''}:\n{sample.question.strip()}"
    for index, choice in enumerate(sample.choices):
        yield f"choice{' (right)' if index == sample.gold else ''}: {choice.strip()}"
    if not sample.choices:
        yield f"\nright answer:\n{sample.reference.strip()}"


def _answers(rows: Sequence[Row], metrics: dict[str, Metric]) -> Iterator[str]:
    """A table: what each policy answered at each budget, and its metrics."""
    measured = dict.fromkeys(name for row in rows for name in row.metrics)
    names = [name for name in measured if name not in SIZES]
    about = {name: describe(name, metrics) for name in names}
    body = [["policy", "budget", *(as_words(name) for name in names), "answer"]]
    for row in rows:
        budget = "" if row.settings["budget"] is None else str(row.settings["budget"])
        told = [number(row.metrics[name], about[name]) if name in row.metrics else "" for name in names]
        answer = row.text.strip().replace("\n", " ") if row.text else row.label or row.reason
        body.append([row.spec, budget, *told, answer[:80]])
    widths = [max(map(len, column)) for column in zip(*body, strict=True)]
    yield ""
    for line in body:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()


def _kept(work: Workload, lm: LoadedModel, sample: Sample, prompt: Prompt, whole: bool) -> Iterator[str]:
    """Of each cell, how many (layer, KV head) pairs keep each part of the context, and what most keep."""
    key = draw_key(work.config.seed, spec_of(work.plan.task), sample.id)
    if any(cell.schedule.chunk is not None for cell in work.plan.cells):
        yield "\nkept tokens are shown for the prefill schedule only"
    for cell, slots in kept_positions(lm, sample, prompt, work.plan.cells, key):
        share = _shares(slots, len(prompt.context))
        tenths = " ".join(f"{part.mean():.2f}" for part in share.tensor_split(10))
        most = (share > 0.5).nonzero().flatten().tolist()
        title = f"{cell.spec} at {cell.budget}"
        yield f"\n{title}: share of heads that keep a token, by tenth of the context: {tenths}"
        runs = [_run(first, last, lm, prompt, whole) for first, last in _runs(most)]
        shown = runs if whole else runs[:RUNS]
        more = f", and {len(runs) - len(shown)} more: --whole prints them" if len(runs) > len(shown) else ""
        yield f"kept by most heads: {', '.join(shown) or 'no token'}{more}"


def _shares(slots: torch.Tensor, tokens: int) -> torch.Tensor:
    """(layer, kv_head, kept) -> (token,): the share of (layer, KV head) pairs that keep it."""
    counts = torch.zeros(tokens).index_add(0, slots.flatten(), torch.ones(slots.numel()))
    return counts / (slots.shape[0] * slots.shape[1])


def _runs(positions: Sequence[int]) -> list[list[int]]:
    """The first and last of neighbours, for ascending positions."""
    runs: list[list[int]] = []
    for position in positions:
        if runs and runs[-1][1] == position - 1:
            runs[-1][1] = position
        else:
            runs.append([position, position])
    return runs


def _run(first: int, last: int, lm: LoadedModel, prompt: Prompt, whole: bool) -> str:
    """A run of positions with its text, or with the ends of a long one."""
    text = lm.tokenizer.decode(list(prompt.context[first : last + 1]))
    if not whole and len(text) > 3 * RUN:
        text = f"{text[:RUN]} ... {text[-RUN:]}"
    return f"{first}-{last} {text!r}"

"""kvbench and kvpress side by side: the same model, prompts, policies, budgets and answers, by the clock.

    python tests/peer/speed_vs_kvpress.py --case short    # 7 policies x 5 budgets x 3 prompts of 1.1k tokens
    python tests/peer/speed_vs_kvpress.py --case long     # 7 policies x 10 budgets x 1 prompt of 4k tokens

Every measurement is a process of its own, in both orders. kvbench makes an ordinary run: full cache, all
metrics, rows and table written. kvpress makes one pass of its own pipeline per (policy, budget, prompt),
which gives a text. Imports and loading the model are not counted on either side; times with them are
printed, too. What was kept must have the same size everywhere, the full cache must answer the same, and so
must, where kvpress ranks by the same number, all cells but the few in which equal scores are cut differently.
The last line is `ratio X.X`: kvpress' total time over ours. The line before it says what is left of that when
kvpress' time is counted as if each prompt were read once, which its user could do by keeping the cache of
the prefill: reading it for every cell but the first is taken off. Exit code 1 when something does not agree.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from typing import Any

CASES = {
    "short": {"budgets": (64, 128, 256, 512, 1024), "length": 1100, "prompts": 3},
    "long": {"budgets": (64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048), "length": 4000, "prompts": 1},
}
# Ours -> theirs, with the parameters of ours. Their ties and, for snapkv, their pooling differ.
POLICIES: dict[str, tuple[str, dict[str, int]]] = {
    "random": ("RandomPress", {}),
    "streaming_llm": ("StreamingLLMPress", {"n_sink": 4}),
    "knorm": ("KnormPress", {}),
    "keydiff": ("KeyDiffPress", {}),
    "lagkv": ("LagKVPress", {"n_sink": 4, "lag_size": 128}),
    "tova": ("TOVAPress", {}),
    "snapkv": ("SnapKVPress", {"window_size": 32, "kernel_size": 7}),
}
SAME_NUMBER = ("knorm", "keydiff")  # policies that both rank by the same number
AGREE = 0.9  # share of those cells that must answer the same: the rest have ties at the cut
SIDES = ("kvbench", "kvpress")


@dataclass(frozen=True)
class Work:
    """What both sides do. task: ours, as text; prompts are its samples."""

    policies: tuple[str, ...]
    budgets: tuple[int, ...]
    length: int
    prompts: int
    new: int
    model: str

    @property
    def task(self) -> str:
        return f"needle:length={self.length},max_new_tokens={self.new}"


@dataclass(frozen=True)
class Side:
    """seconds: the work alone; processor: the same in seconds of all threads, without loading. load: reading
    the weights. total: the whole process. prefill: seconds to read every prompt once, of kvpress alone.

    answers, kept: by "policy budget sample".
    """

    seconds: float
    processor: float
    load: float
    total: float
    answers: dict[str, str]
    kept: dict[str, int]
    prefill: float = 0.0


def name(policy: str, budget: int | None, sample: str) -> str:
    return f"{policy} {budget or 'full'} {sample}"


def clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def since(started: tuple[float, float]) -> tuple[float, float]:
    """Seconds by the clock, and of the processor."""
    return time.perf_counter() - started[0], time.process_time() - started[1]


def run_kvbench(work: Work) -> dict[str, Any]:
    """An ordinary run, without the seconds that it takes to import libraries and to load the weights."""
    import kvbench
    import kvbench.engine.evaluate
    import kvbench.study.runner
    from kvbench.model.open import OpenModel, open_model

    open_model(work.model, "cpu", "float32")  # imports transformers
    load = OpenModel.load
    loading: list[tuple[float, float]] = []

    def timed_load(self: OpenModel) -> Any:
        started = clocks()
        loaded = load(self)
        loading.append(since(started))
        return loaded

    OpenModel.load = timed_load  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        config = kvbench.RunConfig(
            policies=work.policies, tasks=(work.task,), budgets=work.budgets, limit=work.prompts,
            model=work.model, device="cpu", dtype="float32", out=folder,
        )  # fmt: skip
        started = clocks()
        rows = kvbench.run(config, progress=False).rows
        (seconds, processor), (load_s, load_processor) = since(started), loading[0]
    rows = rows.astype({"budget": object}).where(rows.notna(), None)
    cells = [
        (name(policy, budget, sample), text, int(kept))
        for policy, budget, sample, text, kept in rows[["policy", "budget", "sample", "text", "kept"]].values
    ]
    return {
        "seconds": seconds - load_s,
        "processor": processor - load_processor,
        "load": load_s,
        "answers": {cell: text for cell, text, _ in cells},
        "kept": {cell: kept for cell, _, kept in cells},
    }


def prompts(work: Work) -> list[tuple[Any, tuple[int, ...], tuple[int, ...]]]:
    """Our samples with our ids of context and question, which kvpress must read, too."""
    from kvbench.contract.registry import TASKS
    from kvbench.model.open import open_model
    from kvbench.study.samples import SampleOptions, prepare

    task, opened = TASKS.parse(work.task), open_model(work.model, "cpu", "float32")
    items = prepare(task, opened, SampleOptions(task.question, limit=work.prompts)).items
    return [(sample, prompt.context, prompt.question) for sample, prompt in items]  # type: ignore[union-attr]


def run_kvpress(work: Work) -> dict[str, Any]:
    """One pass of kvpress' own pipeline per policy, budget and prompt, on stock attention."""
    from kvbench.model.open import open_model

    given = prompts(work)
    folder = open_model(work.model, "cpu", "float32").folder
    import kvpress
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

    started = clocks()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    load, _ = since(started)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pipe = kvpress.KVPressTextGenerationPipeline(model=model.eval(), tokenizer=tokenizer)
    answers, kept = {}, {}

    def ask(sample: Any, press: Any, cell: str) -> None:
        cache = DynamicCache()
        told = {"question": sample.question, "answer_prefix": sample.answer_prefix}
        answer = pipe(sample.context, press=press, max_new_tokens=work.new, cache=cache, **told)
        answers[cell] = answer["answer"]
        (kept[cell],) = {layer.keys.shape[2] for layer in cache.layers}

    for sample, context, question in given:
        ids = pipe.preprocess(sample.context, [sample.question], sample.answer_prefix, 1 << 20)
        theirs = [tuple(part.flatten().tolist()) for part in (ids["context_ids"], ids["questions_ids"][0])]
        assert theirs == [context, question], f"{sample.id}: kvpress reads other ids"
    started = clocks()
    for sample, context, _ in given:
        for policy in work.policies:
            kind, parameters = POLICIES[policy]
            for budget in work.budgets:
                ratio = max(0.0, 1 - (budget + 0.5) / len(context))  # their count rounds down
                press = getattr(kvpress, kind)(compression_ratio=ratio, **parameters)
                ask(sample, press, name(policy, budget, sample.id))
    seconds, processor = since(started)
    started = clocks()
    with torch.inference_mode():
        for _, context, _ in given:  # as their pipeline reads it: without logits, into a cache
            model.model(input_ids=torch.tensor([context]), past_key_values=DynamicCache())
    prefill, _ = since(started)
    for sample, _, _ in given:  # not counted: kvpress does not need it, ours has it among its cells
        ask(sample, None, name("full", None, sample.id))
    return {
        "seconds": seconds, "processor": processor, "load": load, "answers": answers, "kept": kept,
        "prefill": prefill,
    }  # fmt: skip


def measured(side: str, work: Work) -> Side:
    """One side in a fresh process."""
    command = [sys.executable, __file__, "--side", side, json.dumps(asdict(work))]
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    total = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stderr[-4000:]}")
    return Side(total=total, **json.loads(done.stdout.splitlines()[-1]))


def disagreements(work: Work, ours: Side, theirs: Side) -> list[str]:
    """What the two sides do not agree on, in words."""
    found = [
        f"kept {cell}: {ours.kept.get(cell)} here, {kept} in kvpress"
        for cell, kept in theirs.kept.items()
        if ours.kept.get(cell) != kept
    ]
    if ours.kept.keys() != theirs.kept.keys():
        found.append("the two sides have other cells")
    same = {cell: ours.answers.get(cell, "").strip() == text.strip() for cell, text in theirs.answers.items()}
    found += [f"answer {cell}" for cell, equal in same.items() if cell.startswith("full ") and not equal]
    compared = {cell: equal for cell, equal in same.items() if cell.split()[0] in SAME_NUMBER}
    if compared:
        agree = sum(compared.values())
        apart = "; ".join(cell for cell, equal in compared.items() if not equal)
        print(
            f"answers of {', '.join(SAME_NUMBER)}: {agree} of {len(compared)} equal; not: {apart or 'none'}"
        )
        if agree < AGREE * len(compared):
            found.append(f"only {agree} of {len(compared)} answers are equal")
    print(f"kept sizes compared: {len(theirs.kept)}")
    return found


def ratio(times: dict[str, list[Side]], kind: str) -> float:
    """Their total over ours."""
    ours, theirs = (sum(getattr(done, kind) for done in times[side]) for side in SIDES)
    return theirs / ours


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=CASES, default="short")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--budgets", help="default: the case's")
    parser.add_argument("--prompts", type=int, help="default: the case's")
    parser.add_argument("--length", type=int, help="tokens of a prompt; default: the case's")
    parser.add_argument("--new", type=int, default=12, help="tokens of an answer")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--orders", type=int, choices=(1, 2), default=2, help="1: kvbench first only")
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        side, text = given.side
        work = Work(**{key: tuple(v) if isinstance(v, list) else v for key, v in json.loads(text).items()})
        print(json.dumps(run_kvbench(work) if side == "kvbench" else run_kvpress(work)))
        return 0
    case = CASES[given.case]
    budgets = tuple(map(int, given.budgets.split(","))) if given.budgets else case["budgets"]
    work = Work(
        tuple(given.policies.split(",")), budgets, given.length or case["length"],
        given.prompts or case["prompts"], given.new, given.model,
    )  # fmt: skip
    return compare(work, given.orders)


def compare(work: Work, orders: int) -> int:
    times: dict[str, list[Side]] = {side: [] for side in SIDES}
    for order in (SIDES, SIDES[::-1])[:orders]:
        for side in order:
            done = measured(side, work)
            times[side].append(done)
            told = f"{done.seconds:.1f} s, processor {done.processor:.1f} s, whole process {done.total:.1f} s"
            print(f"{' then '.join(order)}: {side} {told}", flush=True)
    found = disagreements(work, times["kvbench"][0], times["kvpress"][0])
    for fault in found:
        print(f"DIFFERS: {fault}")
    cells = len(work.policies) * len(work.budgets) * work.prompts
    print(
        f"{len(work.policies)} policies x {len(work.budgets)} budgets x {work.prompts} prompts = {cells} "
        f"cells, {orders} orders"
    )
    for what, kind in (("whole processes", "total"), ("processor time", "processor")):
        print(f"{what}: ratio {ratio(times, kind):.1f}")
    again = len(work.policies) * len(work.budgets) - 1  # cells of a prompt that would not read it
    ours, theirs = (sum(done.seconds for done in times[side]) for side in SIDES)
    saved = sum(done.prefill * again for done in times["kvpress"])
    print(f"with each prompt read once by kvpress, too: ratio {(theirs - saved) / ours:.1f}")
    print(f"ratio {theirs / ours:.1f}")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())

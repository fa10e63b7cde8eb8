"""What one more budget, one more policy, KVP's scores and the eviction error cost, in prefills.

    python tests/peer/marginal_cost.py                  # 1.1k tokens, 7 policies x 5 budgets

Whole evaluations of a sample, all metrics included, take turns and are repeated; a line is the median of the
differences between neighbours. Time is that of the processor (of all threads), which other processes disturb
less than the clock. The limits are those that kvbench promises; exit code 1 when one is not kept.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

import kvbench.engine.evaluate as engine
from kvbench.contract.observation import Observation
from kvbench.contract.policy import Policy
from kvbench.contract.registry import POLICIES, TASKS
from kvbench.contract.task import Sample
from kvbench.engine.attention import Layer
from kvbench.engine.bind import bind_policies
from kvbench.engine.cache import Cache
from kvbench.engine.forward import read
from kvbench.engine.observe import Moment, observe_rows
from kvbench.engine.order import rank
from kvbench.model.open import LoadedModel, OpenModel, open_model
from kvbench.model.prompt import Prompt
from kvbench.study.config import RunConfig
from kvbench.study.plan import TaskPlan, plan_task
from kvbench.study.workload import Workload

HEURISTICS = ("random", "streaming_llm", "knorm", "keydiff", "lagkv", "tova", "snapkv")
ONE_MORE = "snapkv:window=16,kernel=5"
BUDGETS = (64, 128, 256, 512, 1024)
MORE_BUDGETS = (64, 128, 256, 384, 512, 1024)

Times = dict[str, list[float]]


def planned(opened: OpenModel, length: int, policies: tuple[str, ...], budgets: tuple[int, ...]) -> Workload:
    task = f"needle:length={length},max_new_tokens=12"
    config = RunConfig(policies, (task,), budgets, limit=1)
    plan = plan_task(config, TASKS.parse(task), [POLICIES.parse(spec) for spec in policies])
    return Workload.build(config, plan, opened)


def seconds(call: Callable[[], Any]) -> float:
    started = time.process_time()
    call()
    return time.process_time() - started


@torch.inference_mode()
def prefill(lm: LoadedModel, prompt: Prompt) -> None:
    cache = Cache.empty(lm.geometry.layers, len(prompt.context))
    read(lm, cache, torch.tensor(prompt.context, device=lm.device), 0)


@torch.inference_mode()
def scoring(lm: LoadedModel, prompt: Prompt, spec: str) -> float:
    """Scores and rankings of a policy in all layers of a context, when the model has read it."""
    policy: Policy = lm.bind(POLICIES.parse(spec))
    n = len(prompt.context)
    layers: list[Observation] = []
    bound = bind_policies(lm, [policy])

    def look(layer: Layer) -> None:
        seen = observe_rows(bound, layer, (0,), Moment(n, n, draw=0))
        layers.append(seen.limited_to(policy.needs))

    cache = Cache.empty(lm.geometry.layers, len(prompt.context))
    read(lm, cache, torch.tensor(prompt.context, device=lm.device), 0, observer=look)

    def score() -> None:
        for seen in layers:
            rank(policy.score(seen), seen.positions, policy.pins, seen.seen)

    score()  # kernels are chosen at the first use
    return seconds(score)


@contextmanager
def answers_apart(spent: list[float]) -> Iterator[None]:
    """Time the answers of the kept sets on their own, and leave those of the full cache in."""
    answer = engine.answer_rows

    def timed(asked: Any, cache: Any, full: Any = None, observer: Any = None) -> Any:
        started = time.process_time()
        result = answer(asked, cache, full, observer)
        if full is not None:
            spent.append(time.process_time() - started)
        return result

    with patch.object(engine, "answer_rows", timed):
        yield


def evaluated(lm: LoadedModel, plan: TaskPlan, sample: Sample, prompt: Prompt) -> tuple[float, float]:
    """Seconds of one evaluation, and of it without the answers of the kept sets."""
    answers: list[float] = []
    with answers_apart(answers):
        total = seconds(lambda: engine.evaluate(lm, sample, prompt, plan.cells, 0))
    return total, total - sum(answers)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=1100, help="tokens of the prompt")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--model", default="smollm2-135m")
    given = parser.parse_args()
    opened = open_model(given.model)
    lm = opened.load()
    base = planned(opened, given.length, HEURISTICS, BUDGETS)
    budget = planned(opened, given.length, HEURISTICS, MORE_BUDGETS)
    policy = planned(opened, given.length, (*HEURISTICS, ONE_MORE), BUDGETS)
    sample, prompt = base.items[0]
    (_, long), *_ = planned(opened, 2048, ("kvp",), BUDGETS).items
    assert isinstance(prompt, Prompt)
    assert isinstance(long, Prompt)
    times: Times = defaultdict(list)
    for turn in range(given.repeat + 1):
        read_s = seconds(lambda: prefill(lm, prompt))
        read_long_s = seconds(lambda: prefill(lm, long))
        base_s, error_s = evaluated(lm, base.plan, sample, prompt)
        budget_s, _ = evaluated(lm, budget.plan, sample, prompt)
        policy_s, _ = evaluated(lm, policy.plan, sample, prompt)
        kvp_s = scoring(lm, long, "kvp")
        if turn == 0:  # kernels are chosen and memory is fetched at the first use
            continue
        times["one prefill (s)"].append(read_s)
        times["all policies and budgets, all metrics"].append(base_s / read_s)
        times["one more budget of one policy"].append((budget_s - base_s) / len(HEURISTICS) / read_s)
        times["one more policy at all budgets"].append((policy_s - base_s) / read_s)
        times["eviction error of all, prefill included"].append(error_s / read_s)
        times["scores of kvp at 2k tokens"].append(kvp_s / read_long_s)
    limits = {
        "one more budget of one policy": 0.15,
        "one more policy at all budgets": 0.6,
        "eviction error of all, prefill included": 1.5,
        "scores of kvp at 2k tokens": 0.03,
    }
    return report(
        times, limits, f"{len(HEURISTICS)} policies x {len(BUDGETS)} budgets, {len(prompt.context)} tokens"
    )


def report(times: Times, limits: dict[str, float], title: str) -> int:
    """The table; how many limits are not kept."""
    print(f"{title}; in prefills of processor time\n")
    print(f"| {'what':40} | median | least | most | limit |\n| {'-' * 40} | ---: | ---: | ---: | ---: |")
    broken = 0
    for name, found in times.items():
        median, limit = statistics.median(found), limits.get(name)
        broken += limit is not None and median > limit
        told = "" if limit is None else f"{limit}"
        print(f"| {name:40} | {median:.3f} | {min(found):.3f} | {max(found):.3f} | {told} |")
    return min(broken, 1)


if __name__ == "__main__":
    raise SystemExit(main())

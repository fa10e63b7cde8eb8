"""Every causal language model of transformers, made tiny and random: does our engine read it right?

    python -m tests.models.sweep                       # all types, as the table of docs/models.md
    python -m tests.models.sweep --only llama,gpt_oss  # some of them
    python -m tests.models.sweep --write docs/models.md

Each type is read through the engine with room for everything, in two pieces and then token by token, and
compared with its own forward over the whole. Exits with 1 when one differs, or is refused too late.
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from kvbench.contract.cell import Cell
from kvbench.contract.registry import POLICIES
from kvbench.contract.task import Sample
from kvbench.engine.evaluate import evaluate
from kvbench.engine.measure import Failure
from kvbench.errors import UnsupportedModel
from kvbench.model.blueprint import check_blueprint
from kvbench.model.geometry import drop_idle_window, read_geometry
from kvbench.model.hook import NAME
from kvbench.model.prompt import Continuation, Prompt
from tests.tiny import tiny_loaded

EQUAL, REFUSED, LATE, DIFFERS, UNMADE = "equal", "refused", "refused late", "differs", "not made tiny"
ORDER = (EQUAL, REFUSED, LATE, DIFFERS, UNMADE)
TOLERANCE = 1e-4  # nats per token, float32
CONTEXT, QUESTION, REFERENCE = 40, 6, 12
SMALL: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "sliding_window": 16, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "kv_channels": 16, "query_pre_attn_scalar": 16,
    "initializer_range": 0.1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 0,
}  # fmt: skip


PART = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
HEAD = """# Models

Any causal language model of transformers whose attention can be replaced, with rotary positions and full
attention in some layers. This table comes from `python -m tests.models.sweep --write docs/models.md`: every
type is made tiny and random, read through the engine with room for everything, and compared with its own
forward (nll within 1e-4 nats). What is refused is refused before weights load. Samples are longer than the
window of sliding layers; type names that share a configuration stand there once.

"""


@dataclass(frozen=True)
class Verdict:
    """What became of a model type, and why."""

    type: str
    result: str
    reason: str = ""


def types() -> dict[str, type]:
    """Configuration classes by model type."""
    found = transformers.AutoModelForCausalLM._model_mapping.keys()
    return {cls.model_type: cls for cls in found}


def tiny_of(cls: type) -> Any:
    """A small configuration; what a type has no word for is left out."""
    config = cls()
    text = config.get_text_config(decoder=True)
    known = {name: value for name, value in SMALL.items() if hasattr(text, name)}
    if not getattr(text, "layer_types", None):
        known["sliding_window"] = None  # in all layers there would be nothing to evict
    small = type(text)(**known)
    if text is config:
        return small
    for name in config.sub_configs:
        part = getattr(config, name)
        setattr(config, name, small if part is text else _tiny_part(part))
    return config


def _tiny_part(config: Any) -> Any:
    """What is beside the decoder, such as an encoder of images."""
    if config is None:
        return None
    known = {name: value for name, value in PART.items() if hasattr(config, name)}
    return type(config)(**known)


def judge(name: str, cls: type) -> Verdict:
    """One type: refused as a command refuses it, before weights are there, or compared."""
    try:
        config = _tiny_or_whole(cls)
        geometry = read_geometry(config)
        drop_idle_window(config)
        check_blueprint(config, geometry)
    except UnsupportedModel as refusal:
        return Verdict(name, REFUSED, _reason(refusal))
    except Exception as error:  # of transformers, for a configuration that it does not expect
        return Verdict(name, UNMADE, _line(error))
    try:
        plain, ours = _models(config)
    except Exception as error:  # the same
        return Verdict(name, UNMADE, _line(error))
    try:
        gap = _gap(plain, ours, config)
    except UnsupportedModel as refusal:
        return Verdict(name, LATE, _reason(refusal))
    except Exception as error:  # any type may fail in its own way
        return Verdict(name, DIFFERS, f"{type(error).__name__}: {_line(error)}")
    return Verdict(name, EQUAL) if gap <= TOLERANCE else Verdict(name, DIFFERS, f"nll by {gap:.2g}")


def _tiny_or_whole(cls: type) -> Any:
    """A tiny configuration; the default one where there is none, which may be refused all the same."""
    try:
        return tiny_of(cls)
    except (TypeError, ValueError, AttributeError, NotImplementedError):
        config = cls()
        read_geometry(config)
        raise


def _models(config: Any) -> tuple[Any, Any]:
    """The plain model, and the same one with our attention."""
    torch.manual_seed(0)
    plain, ours = (
        transformers.AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation=attention, dtype=torch.float32
        ).eval()
        for attention in ("eager", NAME)
    )
    ours.load_state_dict(plain.state_dict())
    return plain, ours


def _gap(plain: Any, ours: Any, config: Any) -> float:
    """The largest difference in nll between our engine with room for everything and the plain forward."""
    lm = replace(tiny_loaded(), model=ours, geometry=read_geometry(config), eos_ids=frozenset())
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 300, (CONTEXT + QUESTION + REFERENCE,), generator=draw).tolist()
    reference = Continuation(tuple(ids[-REFERENCE:]), REFERENCE)
    prompt = Prompt(tuple(ids[:CONTEXT]), tuple(ids[CONTEXT:-REFERENCE]), (), reference)
    cell = Cell(POLICIES.parse("knorm"), CONTEXT)
    found = evaluate(lm, Sample("s", "c", "q", "r", max_new_tokens=4), prompt, [cell], 0)
    kept = found.cells[cell]
    assert not isinstance(kept, Failure), kept.reason
    with torch.inference_mode():
        logprobs = plain(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1)
    wanted = -logprobs[-REFERENCE - 1 : -1].gather(1, torch.tensor(reference.ids)[:, None]).mean().item()
    return max(abs(one.outcome.nll - wanted) for one in (found.full, kept))


def _reason(error: UnsupportedModel) -> str:
    told = str(error).split("is not supported: ", 1)[-1]
    return told.partition("; ")[0].removeprefix("model type ")


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:100]


def table(found: Sequence[Verdict]) -> str:
    """Markdown: the equal types as a list, everything else by reason."""
    counts = Counter(one.result for one in found)
    total = ", ".join(f"{count} {result}" for result, count in counts.most_common())
    lines = [f"transformers {transformers.__version__}, {len(found)} types: {total}.", ""]
    groups: dict[tuple[str, str], list[str]] = {}
    for one in sorted(found, key=lambda one: (ORDER.index(one.result), one.reason, one.type)):
        groups.setdefault((one.result, one.reason), []).append(one.type)
    lines += ["| result | types | reason |", "| --- | --- | --- |"]
    lines += [f"| {result} | {', '.join(names)} | {reason} |" for (result, reason), names in groups.items()]
    return "\n".join(lines) + "\n"


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="model types, separated by commas")
    parser.add_argument("--write", type=Path, help="the document to write")
    asked = parser.parse_args(given)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    known = types()
    found = []
    for name in asked.only.split(",") if asked.only else sorted(known):
        found.append(judge(name, known[name]))
        print(name, found[-1].result, found[-1].reason, file=sys.stderr, flush=True)
    told = table(found)
    if asked.write:
        asked.write.write_text(HEAD + told)
    print(told, end="")
    return int(any(one.result in (LATE, DIFFERS) for one in found))


if __name__ == "__main__":
    sys.exit(main())

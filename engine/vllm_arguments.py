"""Arguments that scripts written for vLLM pass and that mean nothing, or one thing only, here.

An argument at the value that describes what Pagemill does anyway is accepted, so that a script runs unchanged; any
other value is refused by name, since ignoring it would do something else than was asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ANY = object()  # whatever the value, this engine does what it permits
_SWITCH = (None, True, False)

Accepted = Mapping[str, tuple[Any, ...]]

LLM_ARGUMENTS: Accepted = {
    "tensor_parallel_size": (None, 1),
    "pipeline_parallel_size": (None, 1),
    "data_parallel_size": (None, 1),
    "distributed_executor_backend": (None, "uni", "mp"),
    "trust_remote_code": _SWITCH,  # code of a model folder is never run: its architecture is known or refused
    "enforce_eager": _SWITCH,
    "disable_log_stats": _SWITCH,
    "disable_log_requests": _SWITCH,
    "disable_custom_all_reduce": _SWITCH,
    "enable_chunked_prefill": (None, True),
    "use_v2_block_manager": (None, True),
    "enable_lora": (None, False),
    "cpu_offload_gb": (None, 0),
    "max_seq_len_to_capture": (_ANY,),
    "tokenizer_mode": (None, "auto", "hf"),
    "load_format": (None, "auto", "safetensors", "hf"),
    "config_format": (None, "auto", "hf"),
    "kv_cache_dtype": (None, "auto"),
    "generation_config": (None, "auto", "vllm"),
    "task": (None, "auto", "generate"),
    "runner": (None, "auto", "generate"),
    "revision": (None,),
    "tokenizer_revision": (None,),
    "hf_overrides": (None, {}),
    "hf_token": (_ANY,),
    "download_dir": (_ANY,),  # nothing is downloaded
    "limit_mm_per_prompt": (None, {}),
    "compilation_config": (_ANY,),
}

CALL_ARGUMENTS: Accepted = {
    "lora_request": (None,),
    "prompt_adapter_request": (None,),
    "guided_options_request": (None,),
    "priority": (None,),
    "tokenization_kwargs": (None, {}),
    "chat_template": (None,),
    "chat_template_content_format": (None, "auto", "string"),
    "mm_processor_kwargs": (None, {}),
}

SAMPLING_ARGUMENTS: Accepted = {
    "logits_processors": (None, []),
    "guided_decoding": (None,),
    "truncate_prompt_tokens": (None,),
    "spaces_between_special_tokens": (None, True),
    "detokenize": (None, True),
    "best_of": (None,),
}


def is_accepted(accepted: Accepted, name: str, value: Any) -> bool:
    """Whether `name` may be passed with this value, which then is to be left out."""
    values = accepted[name]
    return values[0] is _ANY or any(_same(value, each) for each in values)


def _same(value: Any, neutral: Any) -> bool:
    """Equal, without asking an array whether it is true. 1 and 1.0 are the same, 1 and True are not."""
    if isinstance(value, bool) or isinstance(neutral, bool) or neutral is None:
        return value is neutral
    return isinstance(value, int | float | str | list | tuple | dict) and bool(value == neutral)

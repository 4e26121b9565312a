"""Fields of requests that nothing reads, of all APIs: harmless, neutral with some values, or refused with advice.

What is harmless is listed, not what is harmful: a field in none of these tables is refused by its name, so that
nothing that would change the answer is ever ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Values = Sequence[Any] | None

BOOKKEEPING = (
    "betas",
    "cache_control",
    "client_metadata",
    "include",
    "keep_alive",
    "litellm_metadata",
    "max_tool_calls",
    "metadata",
    "prompt_cache_key",
    "prompt_cache_options",
    "safety_identifier",
    "shift",
    "truncate",
    "user",
)
# of other servers and their machines, whose answers do not depend on them
ELSEWHERE = (
    "access_programs",
    "anthropic_beta",
    "anthropic_version",
    "background_options",
    "billing_policy",
    "cache_prompt",
    "cache_salt",
    "chat_id",
    "compaction",
    "context_management",
    "diagnostics",
    "draft_model",
    "drop_params",
    "dry_allowed_length",
    "dry_base",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "dynatemp_exponent",
    "extra_headers",
    "f16_kv",
    "fallback_credit_token",
    "fallbacks",
    "headers",
    "id_slot",
    "inference_geo",
    "intent",
    "low_vram",
    "main_gpu",
    "mirostat_eta",
    "mirostat_tau",
    "models",
    "num_batch",
    "num_ctx",
    "num_gpu",
    "num_keep",
    "num_retries",
    "num_thread",
    "numa",
    "penalize_newline",
    "penalty_last_n",
    "priority",
    "provider",
    "repeat_last_n",
    "request_id",
    "response_fields",
    "return_progress",
    "return_tokens",
    "route",
    "session_id",
    "snippy",
    "speed",
    "timeout",
    "timings_per_token",
    "tool_stream",
    "trace",
    "ttl",
    "usage",
    "use_mlock",
    "use_mmap",
    "user_profile_id",
    "vocab_only",
    "workspace_id",
    "xtc_threshold",
)
# and the values that need no warning; None: all do not
HARMLESS: Mapping[str, Values] = {
    **dict.fromkeys(BOOKKEEPING),
    **dict.fromkeys(ELSEWHERE, ()),
    "prompt_cache_retention": ["in_memory"],
    "service_tier": ["auto", "default", "standard_only"],
    "store": [False],
    "truncation": ["disabled"],
    "verbosity": ["medium"],
}
OFF = (
    "add_special_tokens",
    "background",
    "continue_final_message",
    "early_stopping",
    "echo",
    "include_stop_str_in_output",
    "logprobs",
    "no_stop_trim",
    "raw",
    "return_tokens_as_token_ids",
    "safe_prompt",
    "use_beam_search",
)
ON = (
    "detokenize",
    "include_reasoning",
    "separate_reasoning",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stream_reasoning",
)
ZERO = (
    "dry_multiplier",
    "dynatemp_range",
    "mirostat",
    "n_probs",
    "t_max_predict_ms",
    "top_a",
    "top_logprobs",
    "xtc_probability",
)
ONE = "best_of", "length_penalty", "n", "tfs_z", "typical_p"
# would change the answer, but for these values
NEUTRAL: Mapping[str, Sequence[Any]] = {
    **dict.fromkeys(OFF, (False,)),
    **dict.fromkeys(ON, (True,)),
    **dict.fromkeys(ZERO, (0,)),
    **dict.fromkeys(ONE, (1,)),
    "function_call": ["none", "auto"],
    "modalities": [["text"]],
    "response_format": [{"type": "text"}],
}
TEXT_ALONE = "the model reads text only"
STATELESS = "nothing is stored; send the whole conversation"
REFUSED: Mapping[str, str] = {  # and what to do instead
    "audio": "the model writes text only",
    "container": "nothing is run here",
    "context": STATELESS,
    "conversation": STATELESS,
    "function_call": "use tool_choice",
    "functions": "use tools",
    "image": TEXT_ALONE,
    "images": TEXT_ALONE,
    "mcp_servers": "the server calls no others; send tools",
    "moderation": "answers are not moderated",
    "previous_response_id": STATELESS,
    "prompt": "send the conversation itself",
    "structured_outputs": "use response_format",
    "suffix": "the model continues text and fills no gaps; send a prompt alone",
    "template": "the model's own is used",
    "web_search_options": "the model cannot search",
    **dict.fromkeys(["grammar", "guided_json", "json_schema"], "use response_format"),
    **dict.fromkeys(["max_new_tokens", "n_predict"], "use max_tokens"),
    "enable_thinking": "use chat_template_kwargs",
}
RENAMED: Mapping[str, str] = {  # other servers' names
    "repeat_penalty": "repetition_penalty",
    "thinking_budget": "reasoning_budget",
    "thinking_token_budget": "reasoning_budget",
}

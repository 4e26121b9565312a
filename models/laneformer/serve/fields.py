"""Fields of requests that nothing reads, in all APIs; any other unknown field is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# The values of a field without effect that need no warning
Values = Sequence[Any] | None
SILENT: Values = None  # all of them
WARNED: Values = ()  # none of them

# Bookkeeping of the client: no warning, whatever the value
BOOKKEEPING = """
betas cache_control client_metadata include keep_alive litellm_metadata max_tool_calls metadata
prompt_cache_key prompt_cache_options safety_identifier shift truncate user
"""
# Settings of other servers and their machines, on which an answer here does not depend
FOREIGN = """
access_programs anthropic_beta anthropic_version background_options billing_policy cache_prompt
cache_salt chat_id compaction context_management diagnostics draft_model drop_params
dry_allowed_length dry_base dry_penalty_last_n dry_sequence_breakers dynatemp_exponent
extra_headers f16_kv fallback_credit_token fallbacks headers id_slot inference_geo intent low_vram
main_gpu mirostat_eta mirostat_tau models num_batch num_ctx num_gpu num_keep num_retries num_thread
numa penalize_newline penalty_last_n priority provider repeat_last_n request_id response_fields
return_progress return_tokens route session_id snippy speed timeout timings_per_token tool_stream
trace ttl usage use_mlock use_mmap user_profile_id vocab_only workspace_id xtc_threshold
"""
# Fields without effect. A client that sends another value than these may believe that it changes
# the answer, so the header `warnings` names the field
IGNORED: Mapping[str, Values] = {
    **dict.fromkeys(BOOKKEEPING.split(), SILENT),
    **dict.fromkeys(FOREIGN.split(), WARNED),
    "prompt_cache_retention": ["in_memory"],
    "service_tier": ["auto", "default", "standard_only"],
    "store": [False],
    "truncation": ["disabled"],
    "verbosity": ["medium"],
}
OFF = """
add_special_tokens background continue_final_message early_stopping echo
include_stop_str_in_output logprobs no_stop_trim raw return_tokens_as_token_ids safe_prompt
use_beam_search
"""
ON = """
detokenize include_reasoning separate_reasoning skip_special_tokens spaces_between_special_tokens
stream_reasoning
"""
ZERO = """
dry_multiplier dynatemp_range mirostat n_probs t_max_predict_ms top_a top_logprobs xtc_probability
"""
ONE = "best_of", "length_penalty", "n", "tfs_z", "typical_p"
# The only values with which these fields leave the answer as it is
NEUTRAL: Mapping[str, Sequence[Any]] = {
    **dict.fromkeys(OFF.split(), (False,)),
    **dict.fromkeys(ON.split(), (True,)),
    **dict.fromkeys(ZERO.split(), (0,)),
    **dict.fromkeys(ONE, (1,)),
    "function_call": ["none", "auto"],
    "modalities": [["text"]],
    "response_format": [{"type": "text"}],
}
TEXT_ALONE = "the model reads text only"
STATELESS = "nothing is stored; send the whole conversation"
# Refused whatever the value, and what to do instead
REFUSED: Mapping[str, str] = {
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
# Names that other servers gave to fields of ours
ALIASES: Mapping[str, str] = {
    "repeat_penalty": "repetition_penalty",
    "thinking_budget": "reasoning_budget",
    "thinking_token_budget": "reasoning_budget",
}

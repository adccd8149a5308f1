"""Expected failures of vLLM's server tests against the gateway, with reasons."""

from __future__ import annotations

N = "asks for n > 1, which the gateway refuses with 400: each answer is a call of its own"
PROMPTS = (
    "sends several prompts in one request, which the gateway refuses with 400: each is a call of its own"
)
TOKENIZER = "counts the tokens of another model's tokenizer"
DOWNLOAD = "loads another model's tokenizer from the internet"
LAST_CHUNK = "expects text in the chunk that has the finish reason, where OpenAI's API has none"
FIELD = "reads `reasoning`, vLLM's name for what the gateway calls `reasoning_content`"
ALL_TOKENS = "asks for the log-probabilities of the whole vocabulary, which the gateway refuses with 400"
TEMPLATE = "changes how the prompt is rendered, which the gateway refuses with 400"
ZEPHYR, OPT, QWEN = "HuggingFaceH4/zephyr-7b-beta", "facebook/opt-125m", "Qwen/Qwen3-0.6B"
CHAT, COMPLETION, ECHO = "plain/test_chat", "plain/test_completion", "plain/test_chat_echo"
TOOLS = "thinking/test_completion_with_function_calling"
SIMPLE = "thinking/test_simple"

NOT_OURS = {
    f"{CHAT}/test_prompt_logprobs_chat[{ZEPHYR}-None]": (
        "expects the field `prompt_logprobs` in answers to requests that do not ask for it"
    ),
    **{f"{CHAT}/test_single_chat_session[{model}]": TOKENIZER for model in (ZEPHYR, "zephyr-lora")},
    **{f"{CHAT}/test_chat_streaming[{model}]": LAST_CHUNK for model in (ZEPHYR, "zephyr-lora")},
    **{
        f"{CHAT}/test_chat_completion_stream_options[{model}]": (
            "asks for min_tokens, which the gateway refuses with 400"
        )
        for model in (ZEPHYR, "zephyr-lora")
    },
    f"{CHAT}/test_custom_role": "sends a role that no API has, which the gateway refuses with 400",
    f"{CHAT}/test_long_seed": "expects the words of another library in the error message",
    f"{CHAT}/test_invocations": "sends requests without a key",
    f"{CHAT}/test_chat_completion_n_parameter_non_streaming[{ZEPHYR}]": N,
    f"{CHAT}/test_chat_completion_n_parameter_streaming[{ZEPHYR}]": N,
    f"{CHAT}/test_chat_completion_n_with_seed[{ZEPHYR}]": N,
    **{
        f"{ECHO}/test_chat_session_with_echo_and_continue_final_message[test_case{n}]": TEMPLATE
        for n in (0, 1)
    },
    f"{ECHO}/test_prompt_logprobs": ALL_TOKENS,
    f"{ECHO}/test_top_logprobs": "sends a string for `logprobs`, where OpenAI's API has true or false",
    f"{COMPLETION}/test_single_completion[{OPT}]": TOKENIZER,
    f"{COMPLETION}/test_completion_truncation_side_controls_prompt_truncation[{OPT}]": (
        "asks for truncate_prompt_tokens, which the gateway refuses with 400"
    ),
    **{
        f"{COMPLETION}/{test}": "asks for logprob_token_ids, which the gateway refuses with 400"
        for test in ("test_logprob_token_ids", "test_logprob_token_ids_stream")
    },
    **{
        f"{COMPLETION}/test_prompt_logprobs_completion[{OPT}-{count}]": PROMPTS
        for count in ("0", "1", "None")
    },
    f"{COMPLETION}/test_completion_streaming[{OPT}]": LAST_CHUNK,
    f"{COMPLETION}/test_parallel_no_streaming[{OPT}]": N,
    f"{COMPLETION}/test_parallel_streaming[{OPT}]": N,
    f"{COMPLETION}/test_completion_stream_options[{OPT}]": (
        "asks for continuous_usage_stats, which the gateway refuses with 400"
    ),
    f"{COMPLETION}/test_batch_completions[{OPT}]": PROMPTS,
    **{f"{COMPLETION}/test_echo_logprob_completion[{n}-{OPT}]": DOWNLOAD for n in (0, 1)},
    "plain/test_messages/test_anthropic_streaming_cache_usage": (
        "passes an argument that the installed Anthropic SDK does not have"
    ),
    **{
        f"{TOOLS}/test_function_tool_use[True-{choice}-{stream}-{QWEN}]": FIELD
        for choice in ("auto", "required", "tool_choice2")
        for stream in (True, False)
    },
    f"{TOOLS}/test_named_tool_use": "expects empty content beside a call, where OpenAI's API has null",
    f"{SIMPLE}/test_enable_response_messages[Qwen/Qwen3-8B]": (
        "asks for enable_response_messages, which the gateway refuses with 400"
    ),
    f"{SIMPLE}/test_extra_sampling_params[Qwen/Qwen3-8B]": (
        "reads the model's reasoning, which the request did not ask for"
    ),
}

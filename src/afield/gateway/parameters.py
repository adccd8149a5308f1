"""Table of request parameters per dialect: honoured, overridden or refused.

An overridden parameter is the trainer's choice and tags the turn `overridden:NAME`. A refused or unknown
one gets 400 with a remedy, or is ignored with the tag `ignored:NAME` in sessions with `unsupported:
ignore`. Names come from the SDKs' types and vLLM's extra parameters. `scripts/parameters_page.py` writes
docs/reference/parameters.md from this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

from msgspec import Struct

from afield.gateway.api_error import bad_request

Handling = Literal["honoured", "overridden", "refused"]


class RequestParameter(Struct, frozen=True):
    """Handling of one request parameter in a dialect."""

    name: str
    """Dotted path, such as `stream_options.include_usage`."""
    handling: Handling
    """Whether the parameter is honoured, overridden or refused."""
    effect: str
    """Effect of the parameter; for a refused one, the remedy."""
    off: tuple[Any, ...] = ()
    """Values of a refused parameter that have no effect and are accepted, besides null and empty ones."""
    unread: bool = False
    """Whether no dialect reads it, so that `check` adds the tag."""
    bare: bool = False
    """Whether an empty object is a value."""


Entries = list[RequestParameter]


def honoured(effect: str, *names: str) -> Entries:
    return [RequestParameter(name, "honoured", effect) for name in names]


def overridden(effect: str, *names: str) -> Entries:
    return [RequestParameter(name, "overridden", effect) for name in names]


def refused(remedy: str, names: Mapping[str, tuple[Any, ...]]) -> Entries:
    return [RequestParameter(name, "refused", remedy, off) for name, off in names.items()]


# --- shared by several dialects ---

NO_EFFECT = "accepted; has no effect on sampling here"
CHOSEN = "the trainer's, unless the session lets its client choose it (`client_sampling`)"
TRAINERS = "the trainer's: no such change is made to the distribution"
FORM = "constrains the reply while it is sampled; see constrained turns"
VERBOSITY = "a trait of the provider's own models; say in the messages how long the answer should be"
ONE_EACH = "send one request per choice; each call is its own turn"
STOPS = "use stop strings; a turn ends where the chat template says"
NO_AUDIO = "ask for text; there is no audio"
TEMPLATE = "the prompt is always that of the model's own chat template"
LIKELIEST = "number of most likely tokens to return per position, at most 20; 400 if the engine reports none"
SCORED = "log-probabilities of the prompt's tokens; 400 if the engine reports none, or with `stream`"
ENGINE = "leave it out; calls go to the run's engine as they are"

WISHES = [*overridden(CHOSEN, "temperature", "top_p", "top_k", "seed")]
PENALTIES = overridden(
    TRAINERS, "presence_penalty", "frequency_penalty", "repetition_penalty", "min_p", "logit_bias"
)
GUIDED = [
    *honoured(FORM, "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *refused(
        "use guided_json, guided_regex, guided_choice or guided_grammar alone",
        {
            "guided_decoding_backend": (),
            "guided_whitespace_pattern": (),
        },
    ),
]
STRUCTURED = [
    *honoured(
        FORM,
        *(f"structured_outputs.{kind}" for kind in ("json", "regex", "choice", "grammar", "json_object")),
    ),
    *honoured("an object", "structured_outputs"),
    *refused(
        "leave it out, and state the rule in the schema or the grammar",
        {
            "structured_outputs.disable_any_whitespace": (False,),
            "structured_outputs.disable_additional_properties": (False,),
            "structured_outputs.whitespace_pattern": (),
            "structured_outputs.structural_tag": (),
        },
    ),
    *refused("leave it out", {"structured_outputs.disable_fallback": (False,)}),
]
STREAM = [
    *honoured("the answer comes as a stream of events", "stream"),
    *honoured("an object", "stream_options"),
    *honoured("accepted; chunks are never padded", "stream_options.include_obfuscation"),
]
USAGE = [
    *honoured("the stream ends with a chunk that has the usage", "stream_options.include_usage"),
    *refused("use include_usage", {"stream_options.continuous_usage_stats": (False,)}),
]
BOOKKEEPING = honoured(
    NO_EFFECT,
    "user",
    "metadata",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
)
OURS = honoured("the answer contains the token ids of the prompt and of the reply", "return_token_ids")
# vLLM's extra parameters of Chat Completions and Completions; Responses and Messages have some of them.
VLLM_SAMPLING = [
    *refused(
        STOPS,
        {
            "stop_token_ids": (),
            "ignore_eos": (False,),
            "min_tokens": (0,),
            "include_stop_str_in_output": (False,),
        },
    ),
    *refused("use structured output to keep words or tokens out", {"bad_words": (), "allowed_token_ids": ()}),
    *refused(
        "leave it out; replies are sampled",
        {
            "use_beam_search": (False,),
            "length_penalty": (1.0,),
            "early_stopping": (False,),
            "best_of": (1,),
            "watermarking": (False,),
            "repetition_detection": (),
        },
    ),
]
VLLM_SERVING = [
    *honoured("accepted; the gateway names requests and sessions itself", "request_id", "session_id"),
    *refused(
        ENGINE,
        {
            "priority": (0,),
            "cache_salt": (),
            "kv_transfer_params": (),
            "ec_transfer_params": (),
            "vllm_xargs": (),
            "media_io_kwargs": (),
            "mm_processor_kwargs": (),
            "mm_payload": ("tensors",),
            "return_mm_kwargs": (False,),
        },
    ),
]
VLLM_STEPS = refused(ENGINE, {"stream_interval": (1,), "routed_experts_prompt_start": (0,)})
VLLM_TEXT = [
    *refused(
        "use return_token_ids, and decode them as you like",
        {
            "skip_special_tokens": (True,),
            "spaces_between_special_tokens": (True,),
            "return_token_offsets": (False,),
            "return_prompt_text": (False,),
        },
    ),
    *refused("shorten the conversation yourself", {"truncate_prompt_tokens": (), "truncation_side": ()}),
    *refused("use top_logprobs", {"logprob_token_ids": ()}),
]
THINKING_ON = "turns thinking on or off by the chat template's own switch; 400 where the template has none"
EFFORT = (
    "reasoning effort, if the chat template has a switch for it; otherwise `none` turns thinking off, any"
    " other value turns it on, and the turn has a tag `overridden:NAME`"
)
BUDGET = "maximum number of thinking tokens; a turn for which it is not enforced has a tag `overridden:NAME`"
KWARGS = [
    *honoured("an object", "chat_template_kwargs"),
    *honoured(THINKING_ON, "chat_template_kwargs.enable_thinking", "chat_template_kwargs.thinking"),
    *honoured(EFFORT, "chat_template_kwargs.reasoning_effort"),
]

# --- dialects ---

CHAT = [
    *honoured("the conversation", "messages"),
    *honoured("returned in the answer; the served model answers, whatever the name", "model"),
    *honoured("offered to the model by its chat template", "tools"),
    *honoured("`required` and named tools are enforced while the reply is sampled", "tool_choice"),
    *honoured("false: one call at most, enforced while the reply is sampled", "parallel_tool_calls"),
    *honoured("may only lower the session's limit", "max_tokens", "max_completion_tokens"),
    *honoured("the reply ends before the first stop string", "stop"),
    *honoured("log-probabilities as they are recorded", "logprobs"),
    *honoured(LIKELIEST, "top_logprobs"),
    *honoured(SCORED, "prompt_logprobs"),
    *honoured("tokens in log-probabilities are spelled `token_id:ID`", "return_tokens_as_token_ids"),
    *honoured(FORM, "response_format"),
    *STREAM,
    *USAGE,
    *WISHES,
    *PENALTIES,
    *GUIDED,
    *STRUCTURED,
    *BOOKKEEPING,
    *honoured("accepted; every call is recorded in any case", "store"),
    *honoured("accepted; an optimisation of the provider's that does not change replies", "prediction"),
    *OURS,
    *honoured(EFFORT, "reasoning_effort"),
    *honoured("an object", "reasoning", "thinking"),
    *honoured(THINKING_ON, "enable_thinking", "reasoning.enabled", "thinking.type"),
    *honoured(EFFORT, "reasoning.effort"),
    *honoured(
        BUDGET, "thinking_token_budget", "thinking_budget", "reasoning.max_tokens", "thinking.budget_tokens"
    ),
    *honoured("false: `reasoning_content` is left out of the answer; it is recorded", "include_reasoning"),
    *honoured("true: `reasoning_content` is left out of the answer; it is recorded", "reasoning.exclude"),
    *KWARGS,
    *refused(ONE_EACH, {"n": (1,)}),
    *refused("send them as tools, with tool_choice", {"functions": (), "function_call": ("auto", "none")}),
    *refused(NO_AUDIO, {"modalities": (["text"],), "audio": ()}),
    RequestParameter("verbosity", "overridden", VERBOSITY, ("medium",), unread=True),
    *refused("leave it out; nothing is moderated here", {"moderation": ()}),
    RequestParameter("web_search_options", "refused", "offer a tool of your own that searches", bare=True),
    *VLLM_SAMPLING,
    *VLLM_SERVING,
    *VLLM_STEPS,
    *VLLM_TEXT,
    *refused(
        TEMPLATE,
        {
            "echo": (False,),
            "add_generation_prompt": (True,),
            "continue_final_message": (False,),
            "add_special_tokens": (False,),
            "chat_template": (),
        },
    ),
    *refused("put the documents into the messages", {"documents": ()}),
]

COMPLETIONS = [
    *honoured("text or token ids; one prompt", "prompt"),
    *honoured("returned in the answer; the served model answers, whatever the name", "model"),
    *honoured("may only lower the session's limit", "max_tokens"),
    *honoured("the text ends before the first stop string", "stop"),
    *honoured("recorded log-probabilities, with this number of most likely tokens per position", "logprobs"),
    *honoured(SCORED, "prompt_logprobs"),
    *honoured("tokens in log-probabilities are spelled `token_id:ID`", "return_tokens_as_token_ids"),
    *honoured(
        "the prompt comes first in the text, with `logprobs` scored; with `max_tokens` 0 nothing is sampled",
        "echo",
    ),
    *honoured(FORM, "response_format"),
    *STREAM,
    *USAGE,
    *WISHES,
    *PENALTIES,
    *GUIDED,
    *STRUCTURED,
    *honoured(NO_EFFECT, "user"),
    *OURS,
    *refused(ONE_EACH, {"n": (1,)}),
    *refused("put what follows into the prompt", {"suffix": ()}),
    *VLLM_SAMPLING,
    *VLLM_SERVING,
    *VLLM_STEPS,
    *VLLM_TEXT,
    *refused("send the prompt with the special tokens that it needs", {"add_special_tokens": (True,)}),
    *refused("send text or token ids", {"prompt_embeds": ()}),
    *refused("use max_tokens; nothing is read as thinking in this dialect", {"thinking_token_budget": ()}),
]

RESPONSES = [
    *honoured(f"{NO_EFFECT}; Codex sends it", "client_metadata"),
    *honoured("the conversation, or what is new in it", "input", "instructions", "previous_response_id"),
    *honoured("returned in the answer; the served model answers, whatever the name", "model"),
    *honoured("functions and custom tools are offered to the model by its chat template", "tools"),
    *honoured("`required` and named tools are enforced while the reply is sampled", "tool_choice"),
    *honoured("false: one call at most, enforced while the reply is sampled", "parallel_tool_calls"),
    *honoured("may only lower the session's limit", "max_output_tokens"),
    *honoured("accepted; it limits calls of provider tools, which do not run here", "max_tool_calls"),
    *honoured(
        "`reasoning.encrypted_content` and `message.output_text.logprobs`; other values ask for the output"
        " of provider tools, which do not run here",
        "include",
    ),
    *honoured(f"if `include` asks for log-probabilities: {LIKELIEST}", "top_logprobs"),
    *honoured("an object", "text", "reasoning"),
    *honoured(FORM, "text.format"),
    *honoured(EFFORT, "reasoning.effort"),
    *honoured(
        "the text of the reasoning is in the answer, as a summary, only where one is asked for",
        "reasoning.summary",
        "reasoning.generate_summary",
    ),
    *honoured("true: the text of the reasoning is in the answer, as its content", "include_reasoning"),
    *honoured(
        "false: the response cannot be fetched later; it is recorded, and may be continued, in any case",
        "store",
    ),
    *STREAM,
    *WISHES,
    *PENALTIES,
    *STRUCTURED,
    *BOOKKEEPING,
    *OURS,
    *KWARGS,
    *refused(
        "leave it out; the session's policy `thinking` says what becomes of earlier reasoning",
        {
            "reasoning.context": ("auto",),
            "reasoning.mode": ("standard",),
        },
    ),
    RequestParameter("text.verbosity", "overridden", VERBOSITY, ("medium",), unread=True),
    *refused("wait for the answer, or stream it", {"background": (False,)}),
    *refused("send the items, or previous_response_id", {"conversation": ()}),
    *refused("send the text of the template as input", {"prompt": ()}),
    *refused(
        "compact it with POST responses/compact, or shorten the conversation yourself",
        {"truncation": ("disabled",), "context_management": ()},
    ),
    *refused("leave it out; nothing is moderated here", {"moderation": ()}),
    *refused("leave it out; it selects a provider's own programme", {"access_programs": ()}),
    *refused("send images in the size that the model is to see", {"image": ()}),
    *refused("use Chat Completions for stop strings", {"stop": ()}),
    *refused(
        STOPS,
        {
            "stop_token_ids": (),
            "ignore_eos": (False,),
            "include_stop_str_in_output": (False,),
        },
    ),
    *refused(
        "use return_token_ids, and decode them as you like",
        {
            "skip_special_tokens": (True,),
            "enable_response_messages": (False,),
            "previous_input_messages": (),
        },
    ),
    *refused("leave it out; replies are sampled", {"watermarking": (False,)}),
    *VLLM_SERVING,
]

ANTHROPIC = [
    *honoured("the conversation", "messages", "system"),
    *honoured("returned in the answer; the served model answers, whatever the name", "model"),
    *honoured("offered to the model by its chat template", "tools"),
    *honoured(
        "`any` and `tool` are enforced while the reply is sampled",
        "tool_choice",
        "tool_choice.type",
        "tool_choice.name",
    ),
    *honoured(
        "true: one call at most, enforced while the reply is sampled", "tool_choice.disable_parallel_tool_use"
    ),
    *honoured("may only lower the session's limit", "max_tokens"),
    *honoured("the reply ends before the first stop string", "stop_sequences"),
    *honoured("the answer comes as a stream of events", "stream"),
    *honoured("an object", "output_config", "thinking"),
    *honoured(FORM, "output_config.format", "output_format"),
    *honoured(EFFORT, "output_config.effort"),
    *honoured(
        "`disabled` turns thinking off by the chat template's own switch (400 where the template has none);"
        " `enabled` turns it on, `adaptive` and none leave it to the model. Thinking blocks are in the answer"
        " with `enabled` and `adaptive` only; thoughts are recorded in any case",
        "thinking.type",
    ),
    *honoured("`omitted`: thinking blocks are empty but for their signature", "thinking.display"),
    *honoured(BUDGET, "thinking.budget_tokens"),
    *honoured(
        NO_EFFECT,
        "metadata",
        "service_tier",
        "inference_geo",
        "user_profile_id",
        "billing_policy",
        "workspace_id",
        "cache_control",
        "betas",
    ),
    *WISHES,
    *PENALTIES,
    *OURS,
    *honoured("log-probabilities as they are recorded, beside the message", "logprobs"),
    *KWARGS,
    *refused("run the MCP client in the agent, and offer its tools", {"mcp_servers": ()}),
    *refused("run the code in the agent's own sandbox", {"container": ()}),
    *refused(
        "shorten the conversation yourself",
        {
            "context_management": (
                {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
                {"edits": []},
            ),
            "compaction": (),
        },
    ),
    *refused("send the whole conversation", {"thread": ()}),
    *refused("leave it out; one model answers", {"fallbacks": (), "fallback_credit_token": ()}),
    *refused("leave it out; there is no prompt cache to ask about", {"diagnostics": ()}),
    *refused("leave it out", {"speed": ("standard",)}),
    *refused("use max_tokens", {"output_config.task_budget": ()}),
    *refused("leave it out; replies are sampled", {"watermarking": (False,)}),
    *refused(
        ENGINE,
        {
            "cache_salt": (),
            "kv_transfer_params": (),
            "ec_transfer_params": (),
            "vllm_xargs": (),
            "mm_payload": ("tensors",),
            "return_mm_kwargs": (False,),
        },
    ),
]

CONFIG = "generationConfig."
CALLING = "toolConfig.functionCallingConfig"
GEMINI = [
    *honoured("the conversation", "contents", "systemInstruction"),
    *honoured("accepted; the model is named in the path", "model"),
    *honoured("functions are offered to the model by its chat template", "tools"),
    *honoured("an object", "toolConfig", CALLING, "generationConfig", f"{CONFIG}thinkingConfig"),
    *honoured(
        "ANY is enforced while the reply is sampled; VALIDATED holds calls to their declarations",
        f"{CALLING}.mode",
    ),
    *honoured("no other function can be called", f"{CALLING}.allowedFunctionNames"),
    *refused("leave it out; calls come whole", {f"{CALLING}.streamFunctionCallArguments": (False,)}),
    *refused(
        "leave it out; tools are the client's own",
        {
            "toolConfig.retrievalConfig": (),
            "toolConfig.includeServerSideToolInvocations": (False,),
        },
    ),
    *honoured("may only lower the session's limit", f"{CONFIG}maxOutputTokens"),
    *honoured("the reply ends before the first stop string", f"{CONFIG}stopSequences"),
    *honoured(
        FORM,
        *(
            f"{CONFIG}{name}"
            for name in ("responseMimeType", "responseSchema", "responseJsonSchema", "responseFormat")
        ),
    ),
    *honoured("log-probabilities as they are recorded", f"{CONFIG}responseLogprobs"),
    *honoured(LIKELIEST, f"{CONFIG}logprobs"),
    *honoured(
        "true: thought parts are in the answer; they are recorded in any case",
        f"{CONFIG}thinkingConfig.includeThoughts",
    ),
    *honoured(
        f"0 turns thinking off as `disabled` does elsewhere, -1 leaves it to the model; else: {BUDGET}",
        f"{CONFIG}thinkingConfig.thinkingBudget",
    ),
    *honoured(EFFORT, f"{CONFIG}thinkingConfig.thinkingLevel"),
    *overridden(CHOSEN, *(f"{CONFIG}{name}" for name in ("temperature", "topP", "topK", "seed"))),
    *overridden(
        TRAINERS,
        *(
            f"{CONFIG}{name}"
            for name in ("presencePenalty", "frequencyPenalty", "repetitionPenalty", "minP", "logitBias")
        ),
    ),
    *honoured("accepted; nothing is filtered here", "safetySettings"),
    *honoured(NO_EFFECT, "labels", "serviceTier", "store"),
    *honoured("the answer contains the token ids of the prompt and of the reply", "returnTokenIds"),
    *refused("send one request per candidate; each call is its own turn", {f"{CONFIG}candidateCount": (1,)}),
    *refused("ask for TEXT", {f"{CONFIG}responseModalities": (["TEXT"], ["text"])}),
    *refused("send the contents themselves", {"cachedContent": (), "continuationToken": ()}),
    *refused("leave it out; nothing is screened here", {"modelArmorConfig": ()}),
    *refused(
        NO_AUDIO,
        {
            f"{CONFIG}speechConfig": (),
            f"{CONFIG}audioTimestamp": (False,),
            f"{CONFIG}audioTranscriptionConfig": (),
            f"{CONFIG}enableAffectiveDialog": (False,),
            f"{CONFIG}translationConfig": (),
        },
    ),
    *refused("ask for text; no images are made", {f"{CONFIG}imageConfig": ()}),
    *refused(
        "send images in the size that the model is to see",
        {
            f"{CONFIG}mediaResolution": ("MEDIA_RESOLUTION_UNSPECIFIED",),
        },
    ),
    *refused(
        "leave it out; one model answers",
        {
            f"{CONFIG}routingConfig": (),
            f"{CONFIG}modelSelectionConfig": (),
            f"{CONFIG}enableEnhancedCivicAnswers": (False,),
            f"{CONFIG}generationOutputConfig": (),
        },
    ),
]


def _table(entries: Entries) -> dict[str, RequestParameter]:
    table = {entry.name: entry for entry in entries}
    assert len(table) == len(entries), "a parameter is listed twice"
    return table


TABLE: Mapping[str, Mapping[str, RequestParameter]] = {
    "chat": _table(CHAT),
    "completions": _table(COMPLETIONS),
    "responses": _table(RESPONSES),
    "anthropic": _table(ANTHROPIC),
    "gemini": _table(GEMINI),
}

NOTHING: tuple[Any, ...] = (None, "", [], {})
IGNORE = "or open the session with unsupported='ignore'"


def unsupported(name: str, message: str, remedy: str, *, ignore: bool) -> tuple[str, ...]:
    """Returns the tag of an ignored parameter; raises 400 unless the session ignores it."""
    if ignore:
        return (f"ignored:{name}",)
    raise bad_request(message, f"{remedy}, {IGNORE}", parameter=name)


def check(dialect: str, name: str, value: Any, *, ignore: bool) -> tuple[str, ...]:
    """Checks a parameter that the dialect does not read, and returns the tags of the turn."""
    entry = TABLE[dialect].get(name)
    if entry is None:
        return unsupported(
            name, f"{name} is not a parameter that is known here", "leave it out", ignore=ignore
        )
    if (value in NOTHING and not (entry.bare and value == {})) or value in entry.off:
        return ()
    if entry.handling != "refused":
        return (f"overridden:{name}",) if entry.unread else ()
    return unsupported(name, f"{name}={_excerpt(value)} is not supported", entry.effect, ignore=ignore)


def check_within(dialect: str, name: str, values: Mapping[str, Any], *, ignore: bool) -> tuple[str, ...]:
    """Checks the fields of an object parameter."""
    if _supported(dialect, name, tuple(values)):
        return ()
    tags: list[str] = []
    for key, value in values.items():
        tags += check(dialect, f"{name}.{key}", value, ignore=ignore)
    return tuple(tags)


@lru_cache(maxsize=256)
def _supported(dialect: str, name: str, keys: tuple[str, ...]) -> bool:
    entries = [TABLE[dialect].get(f"{name}.{key}") for key in keys]
    return all(entry is not None and entry.handling != "refused" and not entry.unread for entry in entries)


def _excerpt(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."

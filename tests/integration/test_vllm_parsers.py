"""vLLM's own tests of its tool parsers, run against this project's dialects: the judge of what a model's calls mean.

Opt-in: ``scripts/test --extras`` downloads vLLM's source distribution; nothing of it is part of this project. Each
disagreement is listed here with its reason.
"""

import pytest

from tests.integration.judged import outcomes_of, table_of

DIALECTS = {
    "apertus_tool_parser": "apertus",
    "deepseekv41_engine_tool_parser": "deepseek_v4_1",
    "dots": "dots",
    "dots_tool_parser": "dots",
    "functiongemma": "functiongemma",
    "functiongemma_tool_parser": "functiongemma",
    "hy_v4_tool_parser": "hunyuan_v4",
    "inkling_tool_parser": "inkling",
    "k2_horizon_tool_parser": "k2_horizon",
    "kimi_k3_tool_parser": "kimi_k3",
    "longcat": "longcat",
    "longcat_tool_parser": "longcat",
    "muse_glimmer_tool_parser": "muse",
    "muse_tool_parser": "muse",
    "step3": "step3",
    "step3_tool_parser": "step3",
    "deepseek_v3": "deepseek_v3",
    "deepseekv31_tool_parser": "deepseek_v3_1",
    "deepseekv32_engine_tool_parser": "deepseek_v3_2",
    "deepseekv3_tool_parser": "deepseek_v3",
    "deepseekv4_engine_tool_parser": "deepseek_v3_2",
    "gemma4_engine_tool_parser": "gemma",
    "gigachat3": "gigachat",
    "gigachat3_tool_parser": "gigachat",
    "glm45": "glm",
    "glm47_moe_tool_parser": "glm",
    "granite-20b-fc": "granite_20b",
    "granite": "granite",
    "granite4_tool_parser": "hermes",
    "hermes": "hermes",
    "hermes_tool_parser": "hermes",
    "hunyuan_a13b": "hunyuan",
    "hy_v3_tool_parser": "hunyuan_v3",
    "internlm": "internlm",
    "internlm2_tool_parser": "internlm",
    "kimi_k2_tool_parser": "kimi_k2",
    "lfm2": "llama_pythonic",
    "llama4_pythonic": "llama_pythonic",
    "llama_tool_parser": "llama_json",
    "minicpm5xml_tool_parser": "minicpm",
    "minimax_m2_tool_parser": "minimax",
    "minimax_m3_tool_parser": "minimax_m3",
    "olmo3": "olmo3",
    "phi4_mini_json": "phi4_mini",
    "poolside_v1_tool_parser": "glm",
    "pythonic": "llama_pythonic",
    "qwen3_engine_tool_parser": "qwen3_coder",
    "step3p5_tool_parser": "qwen3_coder",
    "xlam_tool_parser": "xlam",
}
"""A name or a module of a parser of vLLM: the dialect of this project."""

REPAIR = "vLLM repairs a malformed call; here it is malformed, and the model sees the reason"
CUT = "a call without its closing mark is malformed here; vLLM takes it"
SCHEMA = "vLLM drops or refuses calls by the tool's schema; here the tool itself answers them"
CONTENT = "vLLM drops or joins text around calls in another way; here all text is content"
FORMAT = "vLLM reads only the one of three formats that the request asks for; here each is read"
SECTION = "vLLM wants the mark that ends a section of calls; here each closed call counts"
INTERNAL = "the test needs a real class of vLLM"

BY_REASON: dict[str, dict[str, str]] = {
    REPAIR: {
        "deepseekv32": "test_string_attr_true_coerced_by_schema test_string_attr_true_coerced_by_composed_schema "
        "test_arguments_wrapper_repaired test_input_wrapper_repaired test_number_param "
        "test_streaming_matches_non_streaming_conversion_fallbacks",
        "deepseekv4": "test_extract_tool_calls_arguments_wrapper",
        "gemma4": "test_bare_opener_non_streaming test_bare_opener_multiple_args test_malformed_no_brace_bounded "
        "test_malformed_then_well_formed test_bare_malformed_then_well_formed test_three_mixed_calls "
        "test_colon_in_content_not_broken test_bare_opener_empty_args",
        "kimi_k2": "test_invalid_json_still_extracted",
        "dots": "test_non_stream_supports_multiple_invokes_and_json_fallback",
        "minicpm5xml": "test_tokenizer_space_marker test_collapsed_function_and_param_tags "
        "test_collapsed_param_tags_with_tokenizer_space_function test_collapsed_tags_current_weather "
        "test_properties_wrapped_arguments test_arguments_wrapped_arguments test_alias_get_details_by_phone "
        "test_alias_get_line_details test_alias_enable_roaming",
        "minimax_m3": "test_non_streaming_nested_tool_call",
        "qwen3coder": "test_extract_tool_calls_fallback_no_tags[chat_completion] "
        "test_extract_tool_calls_fallback_no_tags[responses_api] "
        "test_extract_tool_calls_missing_closing_parameter_tag[chat_completion] "
        "test_extract_tool_calls_missing_closing_parameter_tag[responses_api]",
        "step3p5": "test_extract_tool_calls_fallback_no_tags test_extract_tool_calls_missing_closing_parameter_tag",
    },
    CUT: {
        "apertus": "test_incomplete_tool_call",
        "gemma4": "test_incomplete_tool_call",
    },
    SCHEMA: {
        "dots": "test_non_stream_unknown_tool_is_left_as_content",
        "k2_horizon": "test_unknown_or_wrong_named_tool_fails_closed",
        "minicpm5xml": "test_unknown_tool_block_preserved test_case_sensitive_param_name_invalid "
        "test_wrapped_arguments_still_validate_schema test_extra_arguments_ignored_when_required_present "
        "test_extra_arguments_do_not_satisfy_required test_zero_arg_tool_ignores_extra_arguments",
    },
    CONTENT: {
        "deepseekv31": "test_extract_tool_calls_with_multiple_tools",
        "deepseekv4": "test_function_calls_wrapper_is_not_recognized",
        "gigachat3": "test_tool_call[mixed_content_nonstreaming_with_eos_gigachat3] "
        "test_tool_call[mixed_content_nonstreaming_with_eos_gigachat31]",
        "hunyuan_a13b": "test_hunyuan_a13b_tool_parser_extract[4]",
        "lfm2": "test_echoed_tool_call_body_not_leaked_to_content",
        "llama3_json": "test_extract_tool_calls_simple",
        "minicpm5xml": "test_single_call_with_surrounding_text test_multiple_calls_interleaved_text "
        "test_thinking_only_sentencepiece_normalized_in_content",
        "step3p5": "test_extract_tool_calls_non_streaming_mixed_content_and_multiple_tool_calls",
        "xlam": "test_extract_tool_calls[single_tool_with_think_tag]",
    },
    INTERNAL: {
        "glm47_moe": "test_namespace_tool_call_round_trip_to_responses_output",
    },
}
_PING, _LOOKUP = "<ifm|tool_call>ping</ifm|tool_call>", '<ifm|tool_call>{"name": "lookup", "arguments": {"limit": "2"}}'
_MISMATCHED = (
    'tool_request0-<ifm|tool_call>{"name": "ping", "arguments": {}}</ifm|tool_call>',
    f"tool_request1-{_PING}",
    "tool_request2-call2",
    "tool_request3-call3",
)
K2_HORIZON = {
    FORMAT: tuple(f"test_mismatched_formats_fail_closed[{name}]" for name in _MISMATCHED),
    SECTION: (f"test_malformed_and_incomplete_input_is_content[<ifm|tool_calls>{_PING}]",),
    REPAIR: (f"test_request_level_format_overrides[json-{_LOOKUP}</ifm|tool_call>-expected0]",),
}
"""Tests of one file whose names have spaces, by the reason."""
DISAGREEMENTS = {
    f"test_{file}_tool_parser.py::{name}": reason
    for reason, files in BY_REASON.items()
    for file, names in files.items()
    for name in names.split()
} | {f"test_k2_horizon_tool_parser.py::{name}": reason for reason, names in K2_HORIZON.items() for name in names}
"""The file and the name of each test of vLLM with another outcome: the reason."""

AGREEING = 270
"""The tests of vLLM with the same outcome."""


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """The outcome of each test of vLLM that parses text, by file and name."""
    arguments = ["--ignore=tests/tool_parsers/test_structural_tag_registry.py", "tests/tool_parsers"]
    report = tmp_path_factory.mktemp("vllm") / "report.json"
    return outcomes_of("vllm", DIALECTS, arguments, request.config, report)


@pytest.mark.extra
def test_vllms_parsers_agree_or_the_disagreement_is_explained(
    outcomes: dict[str, dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Same names and arguments in every test of vLLM but those in the table, each of which still differs."""
    with capsys.disabled():
        print(table_of("vLLM", outcomes))
    differing = {name for name, result in outcomes.items() if result["outcome"] == "failed"}
    assert sorted(differing - set(DISAGREEMENTS)) == []
    assert sorted(set(DISAGREEMENTS) - differing) == []
    assert len(outcomes) - len(differing) == AGREEING

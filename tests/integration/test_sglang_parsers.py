"""SGLang's own tests of its detectors, run against this project's dialects.

Opt-in: ``scripts/test --extras`` downloads the tests from SGLang's repository, at a fixed commit of August 2026.
Nothing of them is part of this project. Each disagreement is listed here with its reason.
"""

import pytest

from tests.integration.judged import outcomes_of, table_of
from tests.integration.test_vllm_parsers import CONTENT, REPAIR, SCHEMA

DIALECTS = {
    "deepseekv31_detector": "deepseek_v3_1",
    "deepseekv32_detector": "deepseek_v3_2",
    "deepseekv3_detector": "deepseek_v3",
    "deepseekv4_detector": "deepseek_v3_2",
    "gemma4_detector": "gemma",
    "gigachat3_detector": "gigachat",
    "glm47_moe_detector": "glm",
    "glm4_moe_detector": "glm",
    "gpt_oss_detector": "harmony",
    "hermes_detector": "hermes",
    "hunyuan": "hunyuan_v3",
    "hunyuan_detector": "hunyuan_v3",
    "inkling": "inkling",
    "inkling_detector": "inkling",
    "kimi_k3": "kimi_k3",
    "kimik2_detector": "kimi_k2",
    "kimik3_detector": "kimi_k3",
    "lfm2_detector": "llama_pythonic",
    "llama32_detector": "llama_json",
    "minicpm5_detector": "minicpm",
    "minimax_m3": "minimax_m3",
    "mistral_detector": "mistral",
    "muse": "muse",
    "muse_glimmer_detector": "muse",
    "poolside_v1_detector": "glm",
    "pythonic_detector": "llama_pythonic",
    "qwen25_detector": "hermes",
    "qwen3_coder_detector": "qwen3_coder",
}
"""A name or a module of a detector of SGLang: the dialect of this project."""


def of_sglang(reason: str) -> str:
    return reason.replace("vLLM", "SGLang")


QUOTES = "SGLang takes quotation marks from a string; the template writes strings without any, so they are a part of it"
BATCH = "SGLang drops all calls of a reply with one malformed call; here the sound ones run"
UNDECLARED = "SGLang reads the value of an undeclared argument as JSON; here it is text"
THOUGHT = (
    "SGLang's detector shows the thought, which its reasoning parser takes away before; here one parser reads both"
)

BY_REASON: dict[str, dict[str, str]] = {
    of_sglang(REPAIR): {
        "function_call_parser": "TestDeepSeekV32Detector.test_detect_and_parse_json_format"
        " TestGlm4MoeDetector.test_array_argument_with_escaped_json"
        " TestGlm47MoeDetector.test_array_argument_with_escaped_json"
        " TestInklingDetector.test_empty_name_is_allowed_on_the_canonical_path"
        " TestInklingDetector.test_nonfinite_numbers_rejected_canonically_but_recovered"
        " TestInklingDetector.test_raw_text_tool_invocation_surfaces_as_a_call"
        " TestInklingDetector.test_recovery_uses_only_the_last_marker"
        " TestLlama32Detector.test_invalid_then_valid_json",
        "hunyuan_detector": "TestHunyuanDetectorArgDeserialization.test_non_json_value_stays_string",
        "kimik2_detector": "TestKimiK2BareCounterParsing.test_detect_and_parse_bare_counter",
        "kimik3_detector": "test_non_string_arg_json_decoding",
        "poolside_v1_detector": "TestPoolsideV1Detector.test_arg_key_without_value_emits_empty_call"
        " TestPoolsideV1Detector.test_malformed_value_falls_back_to_string"
        " TestPoolsideV1Detector.test_orphan_key_followed_by_new_key_uses_new_key"
        " TestPoolsideV1Detector.test_set_literal_falls_back_to_raw_string",
    },
    of_sglang(SCHEMA): {
        "function_call_parser": "TestGlm4MoeDetector.test_invalid_tool_call TestGlm47MoeDetector.test_invalid_tool_call"
        " TestLfm2Detector.test_detect_and_parse_unknown_function",
        "hunyuan_detector": "TestHunyuanDetectorDetectAndParse.test_mixed_known_and_unknown_tools"
        " TestHunyuanDetectorDetectAndParse.test_unknown_tool_skipped",
        "minicpm5_detector": "test_unknown_tool_block_preserved_v3 test_case_sensitive_param_name_invalid_v3",
        "poolside_v1_detector": "TestPoolsideV1Detector.test_unknown_tool_dropped",
    },
    of_sglang(CONTENT): {
        "function_call_parser": "TestGemma4Detector.test_detect_and_parse_multiple_calls"
        " TestGigaChat3Detector.test_detect_and_parse_with_content_and_eos"
        " TestInklingDetector.test_clean_normal_text_strips_the_full_control_alphabet"
        " TestInklingDetector.test_malformed_json_surfaces_as_raw_fallback"
        " TestInklingDetector.test_raw_fallback_strips_protocol_tokens"
        " TestInklingDetector.test_recovery_requires_a_nonempty_name",
        "mistral_detector": "TestMistralDetector.test_json_array_with_invalid_json",
    },
    BATCH: {"function_call_parser": "TestInklingDetector.test_one_malformed_call_fails_the_whole_batch"},
    QUOTES: {
        "function_call_parser": "TestGlm4MoeDetector.test_quoted_string_invalid_python_escape_no_warning"
        " TestGlm47MoeDetector.test_quoted_string_invalid_python_escape_no_warning",
    },
    UNDECLARED: {"muse_glimmer_detector": "TestMuseGlimmerDetector.test_parameter_value_typing"},
    THOUGHT: {
        "muse_glimmer_detector": "TestMuseGlimmerDetector.test_single_tool_call"
        " TestMuseGlimmerDetector.test_truncated_tool_channel_drops_partial_invoke",
    },
}
DISAGREEMENTS = {
    f"test_{file}.py::{name}": reason
    for reason, files in BY_REASON.items()
    for file, names in files.items()
    for name in names.split()
}
"""The file, the class and the name of each test of SGLang with another outcome: the reason."""

AGREEING = 152
"""The tests of SGLang with the same outcome."""


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """The outcome of each test of SGLang that parses text, by file, class and name."""
    report = tmp_path_factory.mktemp("sglang") / "report.json"
    return outcomes_of("sglang", DIALECTS, ["tests"], request.config, report)


@pytest.mark.extra
def test_sglangs_detectors_agree_or_the_disagreement_is_explained(
    outcomes: dict[str, dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Same names and arguments in every test of SGLang but those in the table, each of which still differs."""
    with capsys.disabled():
        print(table_of("SGLang", outcomes))
    differing = {name for name, result in outcomes.items() if result["outcome"] == "failed"}
    assert sorted(differing - set(DISAGREEMENTS)) == []
    assert sorted(set(DISAGREEMENTS) - differing) == []
    assert len(outcomes) - len(differing) == AGREEING

"""The tests of each finding of the hostile-input study, by its number.

1 ids outside the vocabulary, 2 stored turns that do not fit, 3 logprobs above 0, 4 ``--overwrite`` of a live run,
5 damaged batch files at a resume, 6 other settings at a resume, 7 edits of what identifies a sample, 8 errors of the
display, 9 BaseExceptions, 10 package errors of user code, 11 scopes left open, 12 an inconsistent reply, 13 cyclic
values, NaN of a filter and cancelled tasks, 14 a stopped worker, 15 endless templates and Ctrl-C, 16 huge requests to
the engine, 17 lost signals, 18 a sandbox that is not enforced, 19 what seccomp allows, 20 site-packages in the
sandbox, 21 forged tests, 22 markup in prompts, 23 control characters, 24 endless replies, 25 full disks and closed
outputs, 26 SIGHUP, 27 edits of a stored run, 28 checkpoints, foreign origins and public addresses.

The inputs of environment authors, n04 to n34: 4 a tool that blocks the event loop, 5 a tool that raises, 6 a tool
that returns None, 7 a huge result, 8 bytes and objects, 9 and 10 a step that returns no StepResult, 11 a NaN step
reward, 12 to 14 a reward that is no number, 15 too few rewards of a group, 16 a reward of two arguments, 17 a filter
that drops all, 18 a filter without a bool, 20 a prompt without label, 22 prompts that repeat in a batch, 25 a judge
that is down, 26 a start that drops the prompt, 30 a metric that is a text, 32 a reward that is a text, 34 a list that
hides the tools.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FINDINGS = {
    1: "inference/test_sglang.py::test_a_reply_that_cannot_be_trained_is_refused "
    "runs/test_verify.py::test_hardening_01_an_id_outside_the_vocabulary_is_found",
    2: "runs/test_resume.py::test_a_run_with_a_poisoned_turn_in_its_journal_comes_to_its_end "
    "runs/test_resume.py::test_a_refused_reply_is_never_kept",
    3: "inference/test_sglang.py::test_a_reply_that_cannot_be_trained_is_refused "
    "runs/test_verify.py::test_a_logprob_may_be_above_0_by_what_a_reply_may",
    4: "commands/test_run.py::test_a_live_run_is_left_alone",
    5: "integration/test_restored.py::test_5_resume_restores_a_batch "
    "integration/test_restored.py::test_5_resume_restores_the_other_files",
    6: "runs/test_settings.py::test_6_another_setting_is_refused "
    "integration/test_restored.py::test_6_another_package_version_is_refused_or_recorded",
    7: "training/test_rollout_attempt.py::test_hardening_07_what_identifies_a_sample_is_not_changed "
    "training/test_rollout_attempt.py::test_hardening_07_no_column_of_the_replies_is_changed "
    "training/test_rollout_attempt.py::test_hardening_07_a_prompt_without_a_reply_stays_masked",
    8: "runs/test_run.py::test_an_observer_does_not_end_a_run "
    "concurrency/test_wait_report.py::test_a_failed_report_raises_nothing",
    9: "training/test_rollout_attempt.py::test_hardening_09_base_exceptions_cost_one_group "
    "runs/test_run.py::test_26_an_error_that_is_raised_is_in_run_json",
    10: "training/test_rollout_attempt.py::"
    "test_hardening_10_errors_of_the_package_raised_by_user_code_cost_one_group "
    "training/test_rollout_attempt.py::test_hardening_10_a_status_that_does_not_exist_costs_one_group",
    11: "training/test_rollout_attempt.py::test_hardening_11_a_hostile_environment_costs_one_group",
    12: "training/test_rollout_attempt.py::test_hardening_12_one_inconsistent_reply_costs_one_rollout",
    13: "training/test_rollout_attempt.py::test_hardening_13_what_cannot_be_stored_costs_one_group "
    "training/test_rollout_attempt.py::test_hardening_13_a_filter_that_sets_a_reward_costs_one_group "
    "training/test_rollout_attempt.py::test_hardening_13_cancelling_its_own_task_costs_one_group",
    14: "distributed/test_processes.py::test_a_stopped_process_costs_its_own_groups_only",
    15: "renderer/test_template_sandbox.py::test_a_template_that_does_not_end_is_found "
    "concurrency/test_interrupts.py::test_ctrl_c_ends_a_command_in_its_event_loop",
    16: "engine/test_protocol.py::test_a_bad_sampling_value_is_an_error_with_a_message",
    17: "concurrency/test_interrupts.py::test_ctrl_c_works_while_the_packages_are_imported "
    "concurrency/test_interrupts.py::test_17_the_exit_code_survives_signals_while_the_interpreter_ends",
    18: "sandboxes/test_containment.py::test_what_is_required_by_default_needs_namespaces_or_both_of_the_others",
    19: "sandboxes/test_seccomp.py::test_what_outlives_or_watches_is_refused",
    20: "environments/test_python_tool.py::test_packages_of_the_base_interpreter_are_hidden",
    21: "rewards/test_code.py::test_a_program_cannot_forge_its_tests",
    22: "commands/test_show.py::test_a_run_of_prompts_with_tags_is_shown "
    "views/terminal/test_progress.py::test_a_prompt_is_text_and_not_markup",
    23: "base/test_terminal.py::test_23_no_verb_prints_a_control_character "
    "commands/test_init.py::test_the_text_of_a_server_does_not_control_the_terminal",
    24: "inference/test_sglang.py::test_an_endless_reply_is_bounded_by_what_was_asked_for",
    25: "integration/test_restored.py::test_25_a_resume_on_a_full_disk_is_one_error "
    "runs/test_settings.py::test_25_an_output_that_takes_nothing_changes_no_run "
    "integrations/ors_server/test_app.py::test_25_a_task_id_that_is_no_string_is_refused "
    "test_recipe.py::test_25_limits_that_contradict_max_turns_are_found_before_the_run",
    26: "runs/test_settings.py::test_26_a_closed_terminal_stops_a_run "
    "concurrency/test_interrupts.py::test_26_a_closed_terminal_cancels_a_command",
    27: "integration/test_restored.py::test_27_an_edit_with_a_valid_checksum_is_found "
    "integration/test_restored.py::test_27_the_metrics_are_sealed "
    "runs/test_verify.py::test_27_any_metadata_is_the_same_in_files_and_journal",
    28: "integrations/slime/test_data_source.py::test_28_a_checkpoint_that_contains_code_is_refused "
    "engine/test_server.py::test_28_a_web_page_is_refused "
    "integrations/ors_server/test_app.py::test_28_a_public_address_wants_a_key",
}

VALUES = "environments/test_returned_values.py::"
EVERY_FIELD = VALUES + "test_n09_n11_n30_n32_every_field_of_a_step_is_checked"
BEFORE_WORK = "commands/test_rehearsal.py::test_what_cannot_work_is_refused_before_work"
ROW = "test_bad_inputs.py::test_the_message_is_the_one_of_the_table"

INPUTS = {
    4: "views/terminal/test_progress.py::test_what_blocks_the_event_loop_is_named_while_it_does",
    5: VALUES + "test_n05_a_tool_that_raises_is_named_with_its_line",
    6: VALUES + "test_n06_n08_a_tool_returns_a_text_or_a_number " + VALUES + "test_n06_n07_check_env_finds_it",
    7: VALUES + "test_n07_a_long_result_is_cut " + VALUES + "test_n07_the_default_limit_is_64_kib",
    8: VALUES + "test_n06_n08_a_tool_returns_a_text_or_a_number " + VALUES + "test_n08_a_number_is_read_as_its_text",
    9: EVERY_FIELD,
    10: EVERY_FIELD,
    11: EVERY_FIELD,
    12: BEFORE_WORK,
    13: BEFORE_WORK,
    14: BEFORE_WORK,
    15: BEFORE_WORK,
    16: ROW,
    17: ROW,
    18: BEFORE_WORK,
    20: "commands/test_rehearsal.py::test_20_a_label_that_one_prompt_lacks_is_found",
    22: "training/test_metrics.py::test_prompts_that_repeat_within_a_batch_are_counted",
    25: BEFORE_WORK,
    26: VALUES + "test_n26_start_returns_messages " + VALUES + "test_n26_check_env_says_that_start_drops_the_prompt",
    30: EVERY_FIELD,
    32: EVERY_FIELD,
    34: ROW,
}


@pytest.mark.parametrize(
    "tests", [*FINDINGS.values(), *INPUTS.values()], ids=[*FINDINGS, *(f"n{n:02}" for n in INPUTS)]
)
def test_every_finding_has_its_tests(tests: str) -> None:
    """The tests of each finding and input exist by name."""
    for named in tests.split():
        file, name = named.split("::")
        text = (TESTS / file).read_text(encoding="utf-8")
        assert re.search(rf"^(async )?def {name}\(", text, re.MULTILINE), named

"""Where each sentence of the two documents behind background commands and run logs is shown.

`SHOWN` has, in the words of this project, what the documents want and what was promised beyond them, and the tests that
show it. A test that is renamed or removed makes this one fail.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

SUPERVISOR = "integration/test_supervisor.py"
TREE = "integration/test_process_tree.py"
KEEPER = "integration/test_keeper.py"
CLI = "integration/test_cli_tasks.py"
JOBS = "integration/test_job_logs.py"
OWNED = "integration/test_owned_tasks.py"
TASK_FAULTS = "robustness/test_task_faults.py"
KEEPER_FAULTS = "robustness/test_process_faults.py"
FULL = "robustness/test_full_disk.py"
LEDGER = "robustness/test_ledger_damage.py"
JOURNAL = "unit/test_tasks.py"
LOG = "unit/test_runlog.py"
CRASH = "robustness/test_runlog_crash.py"
SOURCE = "robustness/test_runlog_source.py"

SHOWN: dict[str, list[tuple[str, str]]] = {
    # --- the ledger of processes (000) ---
    "facts and identity of origin are kept outside of the process, a session's in one file": [
        (JOURNAL, "test_a_task_says_all_that_was_recorded"),
        (SUPERVISOR, "test_a_started_task_is_durably_running"),
    ],
    "the intent is durable before anything starts": [
        (TASK_FAULTS, "test_a_worker_killed_at_any_line_runs_nothing_twice"),
        (TASK_FAULTS, "test_an_intent_whose_start_was_interrupted_is_settled_by_who_meets_it"),
    ],
    "a live worker's tasks are neither adopted nor signalled by another": [
        (SUPERVISOR, "test_a_live_second_worker_touches_nothing_of_the_first"),
        (SUPERVISOR, "test_a_stop_from_another_process_is_the_owners_to_act_on"),
        (JOURNAL, "test_only_one_of_two_adopts"),
    ],
    "a start is recognised by session and tool call, for ever": [
        (SUPERVISOR, "test_the_same_tool_call_runs_once"),
        (SUPERVISOR, "test_threads_that_start_one_tool_call_get_one_task"),
        (JOURNAL, "test_the_same_origin_returns_the_first_task"),
        (JOURNAL, "test_compaction_keeps_identities_and_outcomes"),
    ],
    "what cannot be known is lost, and nothing is run again": [
        (SUPERVISOR, "test_a_task_whose_keeper_was_killed_is_lost"),
        (JOURNAL, "test_lost_is_an_end_of_its_own"),
        (KEEPER_FAULTS, "test_a_keeper_killed_at_any_line_runs_its_command_at_most_once"),
    ],
    "what only the keeper knows is taken from its record": [
        (SUPERVISOR, "test_an_outcome_that_only_the_keeper_knows_is_taken_from_its_record"),
        (SUPERVISOR, "test_closing_leaves_session_tasks_to_the_next_worker"),
    ],
    "end, delivery and consumption are durable steps of their own, with one event id": [
        (JOURNAL, "test_no_end_is_lost_or_doubled_between_delivery_and_consumption"),
        (JOURNAL, "test_every_cell_of_the_table"),
    ],
    "the cache is bounded, the journal authoritative": [
        (JOURNAL, "test_what_is_forgotten_is_read_again"),
        (JOURNAL, "test_what_is_read_again_is_what_it_was"),
    ],
    "output that was seen may be taken away; facts and identity stay": [
        (CLI, "test_gc_takes_away_what_is_old_and_was_seen"),
        (JOURNAL, "test_compaction_keeps_identities_and_outcomes"),
    ],
    "damage in the middle refuses, with its place; only a cut end is repaired": [
        (TASK_FAULTS, "test_a_journal_cut_anywhere_in_its_last_two_records"),
        (TASK_FAULTS, "test_a_flipped_bit_in_the_middle_is_refused_with_its_place"),
        (LEDGER, "test_cut_at_every_byte_of_the_last_two_records"),
        (LEDGER, "test_every_flipped_bit_is_refused_with_its_place_and_the_file_left_alone"),
    ],
    # --- processes, beyond the document ---
    "every way to end is told apart": [
        (SUPERVISOR, "test_every_way_to_end_is_told_apart"),
        (SUPERVISOR, "test_no_two_ways_to_end_look_alike"),
    ],
    "a held pipe keeps no command running; whole trees end, without survivor or zombie": [
        (SUPERVISOR, "test_a_child_that_holds_the_pipe_does_not_keep_a_task_running"),
        (SUPERVISOR, "test_a_session_of_its_own_is_found_and_ended"),
        (TREE, "test_no_random_tree_has_a_survivor_or_a_zombie"),
        (TREE, "test_who_hangs_in_the_kernel_is_named_as_left_over"),
    ],
    "stop from another terminal, detach, adoption, tombstone": [
        (CLI, "test_a_detached_command_belongs_to_the_host"),
        (CLI, "test_a_killed_hosts_commands_are_the_next_hosts"),
        (CLI, "test_a_killed_command_line_leaves_its_command_to_the_host"),
        (SUPERVISOR, "test_a_task_whose_keeper_was_killed_is_lost"),
    ],
    "ten thousand forged identities: no signal": [
        (KEEPER_FAULTS, "test_no_forged_identity_is_ever_signalled"),
        (TASK_FAULTS, "test_no_forged_identity_is_signalled_and_all_are_lost"),
    ],
    "the tasks of a job end with it, however it ends and whoever dies": [
        (OWNED, "test_a_cancel_ends_the_tasks_of_the_job"),
        (OWNED, "test_tasks_of_descendants_end_with_the_job_that_is_cancelled"),
        (OWNED, "test_however_a_job_ends_its_tasks_end_with_it"),
        (OWNED, "test_a_job_that_was_given_up_leaves_no_tasks"),
        (OWNED, "test_an_end_that_a_start_overtakes_stops_it"),
        (CLI, "test_a_command_that_a_job_runs_ends_with_the_job"),
        (OWNED, "test_a_start_that_its_jobs_end_overtakes_runs_nothing"),
        (TASK_FAULTS, "test_a_host_killed_at_any_line_leaves_no_task_of_its_job"),
        (TASK_FAULTS, "test_a_recovery_killed_at_any_line_is_done_by_the_next"),
    ],
    "an output cap is exact; the command ends or goes on as the caller chose": [
        (KEEPER, "test_the_output_limit_is_exact"),
        (SUPERVISOR, "test_a_command_may_go_on_beyond_its_cap"),
        (CLI, "test_cut_output_is_said_to_be_cut"),
    ],
    "a piece of a gigabyte costs what the piece costs": [
        (SUPERVISOR, "test_reading_a_huge_output_costs_what_is_asked_for"),
    ],
    "a full disk hides no output and no exit code": [
        (FULL, "test_what_the_keeper_cannot_keep_is_seen"),
        (FULL, "test_output_is_seen_while_it_comes"),
        (FULL, "test_a_reader_that_stands_still_holds_up_its_command_and_nobody_else"),
        (FULL, "test_a_journal_that_takes_nothing_keeps_no_exit_code"),
        (FULL, "test_a_full_disk_keeps_nobody_from_ending_his_own_command"),
    ],
    "thousands of short processes leave threads, descriptors and memory flat": [
        (SUPERVISOR, "test_many_short_tasks_leave_nothing_behind"),
        (JOBS, "test_many_short_commands_of_jobs_leave_nothing_behind"),
        (KEEPER_FAULTS, "test_short_commands_leave_nothing_behind"),
    ],
    "64 threads that log beside 500 starts": [
        (SUPERVISOR, "test_threads_that_log_do_not_lock_out_those_that_start"),
    ],
    # --- run logs (004) ---
    "both streams are drained to their last byte, tails of any length": [
        (SOURCE, "test_an_immediate_end_with_long_tails_is_drained_whole"),
        (SUPERVISOR, "test_the_log_has_every_byte_of_both_streams"),
    ],
    "a restart goes on at each stream's committed place": [
        (SOURCE, "test_a_committed_stdout_prefix_with_stderr_at_zero_resumes_right"),
        (CRASH, "test_a_killed_process_leaves_a_log_that_the_next_one_continues"),
        ("integration/test_keeper_source.py", "test_a_drain_takes_every_byte_across_restarts"),
    ],
    "following ends with the run that was chosen, whatever is active": [
        (LOG, "test_a_finished_run_is_followed_to_its_end_while_another_is_active"),
        (CLI, "test_the_log_of_a_finished_run_ends_while_another_one_is_active"),
        (CLI, "test_a_thousand_runs_are_followed_to_their_last_byte"),
    ],
    "the sidecar is private, bound to task and run, and bounded; an intent, too": [
        (LOG, "test_it_fits_only_its_own_run"),
        (LOG, "test_a_long_append_becomes_several_and_stays_whole"),
        (LOG, "test_an_intent_never_exceeds_its_bound"),
        (LOG, "test_what_is_no_file_of_ours_is_refused"),
    ],
    "one writer, by a lock, that watches what its files are": [
        (LOG, "test_a_second_writer_is_refused_and_changes_nothing"),
        (LOG, "test_a_file_put_in_place_of_an_open_one_is_noticed"),
        (LOG, "test_a_link_in_place_of_the_run_is_refused"),
    ],
    "intent, comparison, missing bytes only, sync, commit: stopped anywhere, each byte once": [
        (CRASH, "test_killed_at_every_effect"),
        (CRASH, "test_killed_at_every_effect_of_every_recovery"),
        (CRASH, "test_every_power_cut_of_a_run"),
        (CRASH, "test_every_power_cut_of_a_recovery"),
        (LOG, "test_a_pending_append_is_completed_with_the_missing_bytes_only"),
    ],
    "unexpected contents, lengths, identities, permissions and versions fail, with no byte altered": [
        (LOG, "test_a_log_that_its_state_does_not_fit_is_refused"),
        (LOG, "test_a_state_that_no_writer_writes_is_refused"),
        (LOG, "test_a_newer_version_is_refused_by_its_own_name"),
        (LOG, "test_every_truncation_of_a_single_record_is_refused"),
    ],
    "after an error the state is read again before anything is written": [
        (CRASH, "test_every_effect_fails"),
        (CRASH, "test_every_failed_sync_and_then_every_power_cut"),
        (CRASH, "test_a_full_disk_in_the_middle_of_an_append_leaves_bytes_that_are_completed"),
    ],
    "empty reads write nothing; acceptance and completion are committed once, with their bytes": [
        (LOG, "test_nothing_to_write_changes_nothing"),
        (LOG, "test_acceptance_happens_once"),
        (LOG, "test_completion_is_once_and_final"),
        (LOG, "test_only_what_no_source_accepted_can_have_never_started"),
    ],
    "the source's identity, final lengths and end are bound and looked at once more": [
        (SOURCE, "test_another_run_is_refused"),
        (SOURCE, "test_stale_final_lengths_are_refused"),
        (SOURCE, "test_a_source_that_changes_its_mind_is_refused"),
        (SOURCE, "test_an_end_of_one_stream_only_is_refused"),
        (SOURCE, "test_a_source_that_gives_more_than_asked_is_refused"),
        (SOURCE, "test_a_run_that_nobody_accepted_is_not_drained"),
        ("integration/test_keeper_source.py", "test_another_keepers_record_is_refused"),
    ],
    "it sleeps where nothing comes, and never while something does": [
        (SOURCE, "test_an_idle_drain_sleeps_and_a_backlog_is_taken_without"),
    ],
    "drain, publication, final status, completion, release, clean-up, in this order and after any crash": [
        (SOURCE, "test_a_run_ends_in_the_one_order"),
        (SOURCE, "test_an_end_interrupted_anywhere_is_finished_by_the_next"),
        (SOURCE, "test_a_failed_publication_is_what_the_log_says"),
        (JOBS, "test_the_log_is_complete_only_after_the_commit"),
    ],
    "a cancelled or abandoned run keeps its owner until it is drained": [
        (JOBS, "test_a_forced_cancel_leaves_a_log_that_is_completed_when_the_tree_is_drained"),
        (JOBS, "test_a_dead_hosts_log_is_completed_by_recovery"),
    ],
    "readers see the checkpoint first, only committed bytes, the last partial line; they create and repair nothing": [
        (LOG, "test_only_committed_bytes_are_exposed"),
        (LOG, "test_readers_never_see_half_a_publication"),
        (LOG, "test_a_partial_line_waits_for_its_end_or_for_completion"),
        (LOG, "test_reading_creates_nothing"),
        (CLI, "test_reading_a_log_needs_no_git_and_changes_nothing"),
    ],
    "a file that is replaced under a reader is opened again": [
        (LOG, "test_a_reader_looks_again_where_the_state_was_replaced_under_it"),
    ],
    "bytes are exact, and visible on a terminal; a reader that goes ends it quietly": [
        (CLI, "test_strange_bytes_are_exact_in_a_pipe"),
        (CLI, "test_strange_bytes_are_visible_on_a_terminal"),
        (CLI, "test_a_follower_ends_quietly_when_its_reader_goes"),
    ],
    "a log without a checkpoint is read, not followed, not written; an empty one begins afresh": [
        (LOG, "test_a_log_without_a_checkpoint_is_read_but_neither_followed_nor_written"),
        (LOG, "test_an_empty_log_without_a_checkpoint_begins_afresh"),
    ],
    "a follower of what nobody will complete says so": [
        (LOG, "test_a_follower_of_an_abandoned_log_says_so"),
    ],
    "fsck compares logs with their states": [
        (CLI, "test_fsck_names_run_logs_that_are_not_what_their_states_say"),
    ],
    "the harness finds a writer with a wrong order": [
        (CRASH, "test_a_writer_with_a_wrong_order_is_found"),
        (CRASH, "test_a_writer_that_trusts_a_failed_sync_is_found"),
    ],
}


@cache
def functions_in(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text())
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and ast.get_docstring(node)
    }


@pytest.mark.parametrize("sentence", SHOWN)
def test_every_sentence_is_shown_by_a_test(sentence: str) -> None:
    """Each has at least one test that exists and says what it claims."""
    assert SHOWN[sentence]
    for file, name in SHOWN[sentence]:
        assert name in functions_in(file), f"{name} is not in tests/{file}"

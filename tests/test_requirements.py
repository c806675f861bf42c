"""Every requirement (`tools/requirements.py`) has tests, named here: one that is renamed or goes is found here."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tools.requirements import REQUIREMENTS

TESTS = Path(__file__).parent
RULES, PLAN = "unit/learner/config/test_rules.py", "unit/learner/config/test_plan.py"
SCHEMA, SERVERS = "unit/learner/config/test_schema.py", "unit/learner/config/test_servers.py"
SHARES, BACKEND = "unit/learner/rollout/test_distribution.py", "unit/learner/rollout/test_server_backend.py"
CLIENT, DISPATCHER = "unit/learner/rollout/test_client.py", "unit/learner/rollout/test_dispatcher.py"
DELIVERY, COMPLETING = "unit/learner/sync/test_server_delivery.py", "unit/learner/steps/test_completing.py"
ONCE, STAGE2 = "unit/learner/steps/test_exactly_once.py", "integration/test_stage2.py"
SERVER, TRAINING = "integration/test_server.py", "integration/test_training.py"

TESTED = {
    "R01": (f"{SCHEMA}::test_r01_variants", "unit/learner/config/test_check.py::test_r01_r18_yaml_only"),
    "R02": ("integration/test_backends.py::test_all_backends_answer_alike",),
    "R03": ("unit/learner/data/test_prompt.py::test_the_first_difference_is_shown",),
    "R04": (f"{RULES}::test_r04_tensor_parallel_size_divides_the_ranks",),
    "R05": (f"{SERVERS}::test_r05_explicit_list", f"{SERVERS}::test_r05_lists_pair_by_index"),
    "R06": ("unit/rollout_server/test_app.py::test_url_prefix",),
    "R07": (f"{BACKEND}::test_requests_go_out_contiguously_with_seeds_and_come_back_in_order",),
    "R08": ("integration/test_adapters.py::test_falling_back_heals_at_once_and_stays",),
    "R09": (f"{DELIVERY}::test_every_server_gets_every_byte_and_the_version_rises_by_one",),
    "R10": (f"{BACKEND}::test_rollouts_of_another_version_are_refused",),
    "R11": ("integration/test_sync.py::test_a_sample_s_rollout_does_not_depend_on_how_calls_are_cut",),
    "R12": ("unit/learner/data/test_batches.py::test_every_sample_once_per_epoch_over_ranks",),
    "R13": (f"{SERVER}::test_ms_swifts_own_client_is_answered",),
    "R14": (f"{BACKEND}::test_what_a_request_holds",),
    "R15": (f"{TRAINING}::test_the_log_says_what_was_asked_of_whom",),
    "R16": (f"{TRAINING}::test_a_server_that_is_down_is_a_message_in_time", f"{SERVERS}::test_r06_r16_bad_urls"),
    "R17": ("unit/deploy/test_launch.py::test_r17_servers_then_learner_each_on_its_devices",),
    "R18": ("unit/learner/steps/test_buffered_training.py::test_every_sample_is_learned_m_times_an_epoch",),
    "R19": (f"{PLAN}::test_r19_packed_rows_are_a_diagnostic",),
    "R20": (
        "unit/learner/rollout/test_colocate_offload.py::test_training_state_is_away_whenever_the_engine_takes_memory",
        f"{RULES}::test_r20_nothing_is_offloaded_while_it_is_trained",
    ),
    "R21": (f"{SHARES}::test_all_ranks_together_keep_the_cap_of_every_server",),
    "R22": ("unit/learner/config/test_legacy.py::test_r22_d3_d7_a_retired_key_names_its_replacement",),
    "R23": (f"{BACKEND}::test_world_sizes_are_asked_once_per_server", f"{SHARES}::test_the_document_s_infeasible_case"),
    "R24": (f"{TRAINING}::test_two_ranks_are_one_learner",),
    "R25": (f"{STAGE2}::test_steps_learn_packs_that_were_made_ahead_of_them",),
    "R26": ("unit/learner/config/test_schedule.py::test_channel_b_share_is_exact_after_every_step",),
    "R27": ("unit/learner/config/test_schedule.py::test_b_runs_only_where_every_rank_has_packs",),
    "R28": ("unit/learner/policy/test_packed.py::test_an_empty_row_gives_zero_gradient",),
    "R29": (f"{PLAN}::test_r29_temperature_above_zero_samples", f"{BACKEND}::test_decode_modes"),
    "R30": (f"{BACKEND}::test_timeout_then_split_and_retry",),
    "R31": ("unit/learner/steps/test_stage2.py::test_each_sample_is_rolled_out_and_learned_once_an_epoch",),
    "R32": (f"{STAGE2}::test_rollouts_are_asked_for_at_once_and_learned_as_they_end",),
    "R33": (f"{RULES}::test_r33_explicit_accumulation_equals_the_derived",),
    "R34": ("unit/learner/steps/test_in_step.py::test_every_segment_is_in_one_row_and_rows_are_never_more_than_fifos",),
    "R35": ("unit/learner/tasks/detection/test_target.py::test_plain_teacher_forcing_is_the_whole_answer",),
    "R36": ("unit/learner/steps/test_packing.py::test_oversized_segment_fails_at_insertion",),
    "R37": (f"{STAGE2}::test_policy_gradients_learn_what_the_server_drew",),
    "R38": ("unit/learner/test_extensions.py::test_rewards_and_a_loss_of_the_users_own",),
    "R39": (f"{SERVER}::test_several_answers_with_their_log_probabilities",),
    "R40": ("integration/test_faults.py::test_one_of_two_servers_is_killed_and_then_the_other",),
    "R41": ("unit/learner/data/test_formats.py::test_the_format_is_found_out",),
    "R42": ("unit/shared/sync/test_strangers.py::test_nothing_is_unpickled_from_join_to_leave",),
    "R43": ("unit/learner/missing/test_review.py::test_what_is_accepted_is_written_in_the_format_that_came_in",),
    "R44": ("unit/learner/test_trainer.py::test_what_is_retained_is_scored_beside_each_evaluation",),
    "R45": ("integration/test_images.py::test_the_engine_is_fed_the_learners_pixels",),
    "R46": ("unit/deploy/test_launch.py::test_r46_what_one_machine_cannot_do",),
    "R47": ("unit/learner/policy/test_shared_prompts.py::test_loss_and_gradients_are_those_of_whole_segments",),
    "R48": (f"{COMPLETING}::test_what_is_learned_is_what_complete_labels_teach",),
    "R49": ("unit/learner/tasks/detection/test_audit.py::test_sixty_verdicts_say_how_often_the_others_are_right",),
    "R50": ("unit/learner/detector/test_first_boxes.py::test_suggestions_become_the_first_labels",),
    "R51": ("integration/test_compose.py::test_a_run_outlives_its_server_and_ends_with_the_learners_exit_code",),
    "R52": ("unit/learner/detector/test_evaluation.py::test_results_of_other_annotations_are_refused",),
    "D1": (f"{DELIVERY}::test_only_rank_0_syncs_and_all_ranks_infer_afterwards",),
    "D2": (f"{RULES}::test_d2_no_rollout_buffer_under_stage2",),
    "D3": (f"{SCHEMA}::test_defaults_as_the_documents_give_them",),
    "D4": (f"{SHARES}::test_equals_the_slot_by_slot_reference_and_covers_every_request_in_order",),
    "D5": ("integration/test_ddp.py::test_ranks_and_packing_do_not_change_the_step",),
    "D6": (f"{RULES}::test_d6_a_rollout_buffer_needs_drop_last",),
    "D7": ("unit/learner/config/test_legacy.py::test_r22_d3_d7_a_retired_key_names_its_replacement",),
    "D8": (f"{RULES}::test_d8_stage2_needs_its_batch",),
    "D9": (f"{DISPATCHER}::test_every_server_is_full_until_the_last_request_is_sent",),
    "D10": (f"{SHARES}::test_all_ranks_together_keep_the_cap_of_every_server",),
    "D11": (f"{ONCE}::test_each_sample_is_learned_once_in_each_of_three_epochs",),
    "D12": (f"{ONCE}::test_rare_channel_b_steps_get_a_sync_of_their_own",),
    "D13": ("unit/shared/test_images.py::test_a_form_outside_the_list_is_refused",),
    "D14": (f"{DELIVERY}::test_a_tensor_that_is_not_the_scored_one_is_never_served",),
    "D15": ("integration/test_chaos.py::test_nothing_is_lost_under_faults",),
    "D16": (f"{CLIENT}::test_a_swallowed_reply_is_given_up_while_health_answers",),
    "D17": ("unit/learner/run/test_best.py::test_training_evaluates_on_val_and_scores_test_once",),
    "D18": (f"{RULES}::test_d18_the_default_loss_is_the_specified_one",),
    "D19": ("unit/shared/sync/test_shared_gpu.py::test_ranks_on_one_gpu_learn_it_when_they_meet",),
    "D20": (f"{COMPLETING}::test_a_completion_begins_from_the_annotations",),
    "D21": ("unit/learner/steps/test_groups.py::test_a_batch_is_the_step_whatever_its_micro_steps_and_ranks",),
    "D22": ("unit/learner/tasks/detection/test_gaps.py::test_photographs_say_what_is_right_in_every_kind_of_gap",),
    "D23": ("unit/learner/data/test_units.py::test_a_split_in_another_unit_warns_with_the_unit_that_fits",),
    "D24": ("unit/learner/detector/test_model.py::test_a_link_that_leaves_the_run_s_folder_is_refused_by_name",),
}


@cache
def names_in(path: str) -> set[str]:
    file = TESTS / path
    tree = ast.parse(file.read_text(encoding="utf-8")) if file.is_file() else ast.Module([], [])
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_requirement_is_in_the_table() -> None:
    assert TESTED.keys() == REQUIREMENTS.keys()


@pytest.mark.parametrize("requirement", TESTED)
def test_its_tests_are_there(requirement: str) -> None:
    assert TESTED[requirement]
    for path, _, name in (test.partition("::") for test in TESTED[requirement]):
        assert name in names_in(path), f"name another test of {requirement}: {REQUIREMENTS[requirement]}"

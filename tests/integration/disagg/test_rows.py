"""Which tests show each acceptance case of disaggregation, by its number: the table, and that all of them are there.

A name stands for all cases that it is run with. What must hold at the end of each (I1 to I4) is `support.pairs.at_rest` and
`support.disagg.Engines.at_rest`; I5 is test_38, test_43 and test_i5; I6 is test_shaping and tests/core/disagg.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2]
HERE = "integration/disagg"
ACCEPTANCE, PHASES, CONNECTORS = (f"{HERE}/test_{name}.py" for name in ("acceptance", "phases", "connectors"))
SHAPING, OPTIONS, RECOMPUTE = (f"{HERE}/test_{name}.py" for name in ("shaping", "options", "recompute"))
TROUBLE, AT_ONCE = (f"{HERE}/test_{name}.py" for name in ("trouble", "three_hundred"))
SERIAL, CONCURRENT, ABORTS, HOSTILE = (
    f"integration/test_disagg_{name}.py" for name in ("serial", "concurrent", "aborts", "hostile")
)
CORE = "core/disagg/test_connectors.py"

ROWS: dict[int, dict[str, str]] = {
    1: {SHAPING: "test_limits", CORE: "test_limits"},
    2: {SHAPING: "test_limits"},
    3: {SHAPING: "test_limits"},
    4: {SHAPING: "test_one_token_is_decodes_own", CONNECTORS: "test_4_one_token"},
    6: {SHAPING: "test_limits"},
    7: {SHAPING: "test_limits", CONNECTORS: "test_7_several_choices"},
    8: {ACCEPTANCE: "test_8_a_tool_that_must_be_called"},
    9: {ACCEPTANCE: "test_9_log_probabilities_of_the_prompt", OPTIONS: "test_prompt_logprobs_merged"},
    10: {SHAPING: "test_what_is_the_gateways_own", CORE: "test_nothing_of_a_clients_own_passes"},
    11: {SHAPING: "test_what_is_the_gateways_own", SERIAL: "test_two_legs", CONCURRENT: "test_a_sidecar"},
    13: {SHAPING: "test_the_clients_octets", "core/disagg/test_body.py": "test_the_decode_body_is_the_clients_own"},
    14: {SHAPING: "test_eight_mebibytes"},
    16: {SERIAL: "test_prefills_refusal_is_the_clients"},
    17: {SERIAL: "test_17_19_the_other_prefill_serves test_another_prefill_after_an_error"},
    19: {SERIAL: "test_17_19_the_other_prefill_serves test_another_prefill_after_an_error"},
    20: {SERIAL: "test_another_prefill_after_a_failure test_no_prefill_is_left", HOSTILE: "test_prefill_says"},
    22: {SERIAL: "test_no_prefill_is_left"},
    23: {SERIAL: "test_no_prefill_is_left test_no_decode_takes_connections test_nobody_of_a_role"},
    24: {SERIAL: "test_decodes_refusal_is_the_clients test_engines_that_do_not_tell_of_refusals",
         TROUBLE: "test_who_turns_requests_away_before_decode_has_read_them"},
    25: {SERIAL: "test_prefilled_anew_after_decodes_failure test_decode_fails_twice"},
    27: {SERIAL: "test_a_first_error_is_relayed_or_a_status", HOSTILE: "test_decode_says"},
    28: {SERIAL: "test_prefilled_anew_after_decodes_failure test_28_a_transfer_that_fails_within_the_stream"},
    29: {SERIAL: "test_29_decode_dies_mid_stream"},
    30: {ACCEPTANCE: "test_30_pauses_within_a_stream"},
    31: {ABORTS: "test_during_prefill test_31_35_at_once", PHASES: "test_leaving_within", AT_ONCE: "test_they_leave_at_once"},
    32: {ABORTS: "test_as_prefill_answers test_a_prefill_that_takes_longer_than_its_grace", PHASES: "test_leaving_within"},
    34: {ABORTS: "test_between_head_and_first_octet test_no_longer_than_the_grace test_a_decode_that_never_fetches_is_counted "
         "test_34_engines_that_do_not_survive_an_abort test_34_after_a_probe test_many_at_once",
         PHASES: "test_leaving_within", AT_ONCE: "test_they_leave_at_once"},
    35: {ABORTS: "test_mid_stream test_31_35_at_once", PHASES: "test_leaving_within", AT_ONCE: "test_they_leave_at_once"},
    36: {ABORTS: "test_between_the_legs test_many_between_the_legs", PHASES: "test_leaving_within_the_handoff",
         AT_ONCE: "test_they_leave_between_the_legs"},
    37: {ACCEPTANCE: "test_37_a_client_that_does_not_read"},
    38: {ACCEPTANCE: "test_38_cut_at_every_offset test_i5_by_checksum"},
    40: {CONNECTORS: "test_40_content_types"},
    41: {OPTIONS: "test_cached_tokens_of_a_stream test_cached_tokens_of_a_whole_answer"},
    42: {OPTIONS: "test_cached_tokens_of_a_stream"},
    43: {ACCEPTANCE: "test_43_an_answer_of_20_megabytes"},
    44: {OPTIONS: "test_recomputed_is_relayed_and_counted", RECOMPUTE: "test_what_is_not_exact_is_relayed"},
    46: {RECOMPUTE: "test_46_what_is_left_of_a_limit test_it_goes_on test_every_connector"},
    47: {ACCEPTANCE: "test_47_in_equal_parts"},
    49: {ACCEPTANCE: "test_49_a_prefill_leaves_while_others_are_busy",
         SERIAL: "test_a_prefill_engine_stays_until_its_kv_is_fetched"},
    50: {ACCEPTANCE: "test_50_what_is_added", "integration/test_fleet_api.py": "test_a_token_is_asked"},
    51: {ACCEPTANCE: "test_51_all_are_removed"},
    52: {CONCURRENT: "test_the_first_that_fails_ends_the_other"},
    53: {CONCURRENT: "test_no_connection_to_decode"},
    55: {CONCURRENT: "test_they_meet test_the_first_that_fails_ends_the_other", CORE: "test_sglang_batches"},
    56: {CONCURRENT: "test_mooncake test_56_mooncake_s_prefill_fails", CONNECTORS: "test_56_an_engine_is_started_anew"},
    57: {CONCURRENT: "test_layerwise test_layerwise_prefill_fails test_layerwise_the_client_leaves"},
    59: {CORE: "test_p2p_nccl", CONNECTORS: "test_the_text_of_one_engine"},
    60: {CORE: "test_moriio_read test_moriio_write test_moriio_rank_is_checked test_limits",
         CONNECTORS: "test_the_text_of_one_engine"},
    61: {ACCEPTANCE: "test_61_many_at_once"},
    62: {ACCEPTANCE: "test_62_engines_that_close_idle_connections", HOSTILE: "test_a_kept_connection_is_stale"},
    64: {ACCEPTANCE: "test_64_a_stop_with_all_under_way", ABORTS: "test_a_stop_waits_for_what_is_detached",
         TROUBLE: "test_a_stop_between_the_legs"},
    65: {ACCEPTANCE: "test_65_a_role_is_no_token", SERIAL: "test_the_parts_of_the_time_to_the_first_token"},
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_they_are_there(row: int) -> None:
    for file, names in ROWS[row].items():
        found = set(re.findall(r"def (test_\w+)\(", (TESTS / file).read_text()))
        assert set(names.split()) <= found, (file, set(names.split()) - found)


def test_numbers_in_names_are_those_of_the_table() -> None:
    """A test that bears the number of a case is listed with it."""
    for file in {file for listed in ROWS.values() for file in listed if "disagg" in file}:
        for name, numbers in re.findall(r"def (test_((?:\d+_)+)\w+)\(", (TESTS / file).read_text()):
            for number in map(int, numbers.strip("_").split("_")):
                assert name in ROWS[number].get(file, "").split(), (file, name)

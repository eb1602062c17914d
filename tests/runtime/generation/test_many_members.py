"""Many members agree on a generation, in virtual time: the store answers one after another."""

from tests.runtime.generation.virtual_time import form_next

NODE = 8
"""Members of a node."""
SILENCE_S = 0.5


def test_many_members_agree_within_moments_by_a_few_calls_each() -> None:
    formed = form_next(256)
    assert formed.lost == {()}
    assert formed.seconds < 0.2
    assert formed.num_calls < 12 * 256


def test_the_others_go_on_if_those_freeze_whose_turns_come_most_often() -> None:
    """They have said that they are here, so the others' places come after theirs."""
    formed = form_next(128, num_frozen=NODE, num_here=NODE // 2, silence_s=SILENCE_S)
    assert formed.lost == {tuple(range(NODE))}
    assert formed.seconds < 3 * SILENCE_S


def test_checks_of_many_members_dont_use_up_the_store() -> None:
    """The more members wait, the more there are that check, and that are checked."""
    formed = form_next(256, num_frozen=4, silence_s=SILENCE_S)
    assert formed.lost == {tuple(range(4))}
    # The last of 256 reads every quarter of a second.
    assert formed.seconds < SILENCE_S + 0.35
    assert formed.busy_s < formed.seconds / 4

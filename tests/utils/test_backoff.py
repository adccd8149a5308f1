"""Back-off: growth, maximum, reset, jitter."""

from afield.utils.backoff import Backoff


def test_pauses_double_up_to_the_longest_and_begin_anew_after_a_reset():
    backoff = Backoff(0.5, 3.0)
    assert [backoff.advance() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    backoff.reset()
    assert backoff.next_s == 0.5


def test_a_factor_near_one_pauses_for_that_part_of_the_wait():
    backoff = Backoff(0.05, 0.25, factor=1.05)
    pauses = [backoff.advance() for _ in range(60)]
    assert all(pause <= max(0.05, 0.0505 + 0.05 * sum(pauses[:n])) for n, pause in enumerate(pauses))
    assert pauses[-1] == 0.25


def test_jitter_keeps_at_least_half_of_a_pause():
    pauses = [Backoff(1.0, 8.0, jitter=True).advance() for _ in range(100)]
    assert all(0.5 <= pause <= 1.0 for pause in pauses)
    assert len(set(pauses)) > 1

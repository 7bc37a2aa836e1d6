"""How long replies are expected to become."""

from nanovllm.state.expected_reply import EXPECTED_REPLY, after_preemptions, after_reply


def test_replies_that_end_early_bring_it_to_two_thirds_of_their_length():
    for start in (EXPECTED_REPLY, 16):
        expected = start
        for _ in range(300):
            expected = after_reply(expected, 300, at_limit=False, longest=4096)
        assert abs(expected - 200) <= 16


def test_replies_at_their_limits_make_it_as_long_as_requests_may_be():
    expected = 64
    for _ in range(100):
        expected = after_reply(expected, 5, at_limit=True, longest=4096)
    assert expected == 4096


def test_each_preemption_makes_it_longer():
    assert after_preemptions(800, 0, 4096) == 800
    assert after_preemptions(800, 1, 4096) == 901
    assert after_preemptions(800, 2, 4096) == after_preemptions(901, 1, 4096)
    assert after_preemptions(800, 50, 4096) == 4096
    assert after_preemptions(0, 3, 4096) == 3  # it can always grow again

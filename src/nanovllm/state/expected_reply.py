"""How long replies are expected to become: a request is admitted if it and those that run can grow to that length together.

Requests that grow beyond the pool preempt each other, and tokens run twice. The limits of replies (`max_tokens`) are known, but many
replies end long before. So an engine learns a length, from nothing but the tokens that it ran:

- It begins at `EXPECTED_REPLY` tokens.
- A preemption makes it longer by an eighth, because too much was admitted.
- A reply that reaches its limit makes it longer by a sixteenth, because limits then tell how long replies become.
- A reply that ends before its limit moves it by a sixteenth of the way to two thirds of the reply's length. Two thirds, because a few
  tokens that run twice cost less than rows that stay empty.

A running reply is expected to grow to this length, but never beyond its own limit. One that is longer, or nearly as long, is expected to
grow by an eighth of this length.
"""

EXPECTED_REPLY = 1024  # tokens


def after_preemptions(expected: int, count: int, longest: int) -> int:
    """The expected length after a step that preempted `count` sequences, at most `longest`."""
    for _ in range(count):
        expected += expected // 8 + 1
    return min(expected, longest)


def after_reply(expected: int, num_generated: int, *, at_limit: bool, longest: int) -> int:
    """The expected length after the end of a reply.

    Args:
        expected: The length before.
        num_generated: Tokens of the reply.
        at_limit: Whether the reply reached its limit.
        longest: The longest expected length, in tokens.

    Examples:
        >>> after_reply(1024, 240, at_limit=False, longest=4096), after_reply(1024, 240, at_limit=True, longest=4096)
        (970, 1089)
    """
    if at_limit:
        return min(expected + expected // 16 + 1, longest)
    return expected + (num_generated * 2 // 3 - expected) // 16

"""Reward functions of the trainer tests, in a module that a reward worker can import cheaply."""


def digits_share(data_source, solution_str, ground_truth, extra_info=None):
    """The share of digits in a response: a reward that random text gets a varied part of."""
    return sum(c.isdigit() for c in solution_str) / 5


def slow_share(data_source, solution_str, ground_truth, extra_info=None):
    """The same, not at once."""
    import time

    time.sleep(0.1)
    return digits_share(data_source, solution_str, ground_truth)

"""Reward functions of these tests, in a module that a worker process imports quickly."""


def one(solution_str):
    return 1.0


def by_source(data_source, solution_str):
    return 1.0 if data_source == "A" else {"score": 0.5, "acc": True, "pred": solution_str}


def two(solution_str, ground_truth):
    return float(solution_str == ground_truth)


def anything(**kwargs):
    return float(kwargs["solution_str"] == kwargs["ground_truth"])


async def awaited(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)


def raising(solution_str, ground_truth):
    if solution_str == "crash":
        raise ValueError("this one row")
    return float(solution_str == ground_truth)


def accurate(solution_str):
    """A score that varies where the accuracy does not."""
    return {"score": sum(c.isdigit() for c in solution_str) / 5, "acc": len(solution_str) > 4}


def worse_the_better(solution_str, extra_info=None):
    """Digits are good in training and bad in validation, so the first validation is the best."""
    share = sum(c.isdigit() for c in solution_str) / 5
    return -share if extra_info["split"] == "validation" else share

"""Tools of the tests of conversations."""


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first number.
        b: the second number.
    """
    return a + b


async def wait(word: str) -> dict:
    """Gives a word back later.

    Args:
        word: any word.
    """
    return {"word": word, "score": float("nan")}


def _helper():
    raise AssertionError("not a tool")

"""The text of an error, for comparisons of what ranks raise."""

from collections.abc import Callable
from typing import Any


def error_of(action: Callable[[], Any]) -> str:
    """Return the text of the error that an action raises; "no error" if it raises none."""
    try:
        action()
    except (ValueError, NotImplementedError, RuntimeError, OSError) as error:
        return str(error)
    return "no error"

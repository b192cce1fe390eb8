"""A call of a plug-in's method. Every message about it names the section, class, method and problem."""

from __future__ import annotations

import inspect
import traceback
from types import TracebackType

from magrpo.errors import ConfigError, PluginFailed, quote_value

_MAX_FRAMES = 3
"""Number of stack frames to show of an exception inside a plug-in."""


class PluginUnavailable(PluginFailed, ConnectionError):
    """A method of a plug-in raised an OSError, from a file or a remote service. Another attempt may succeed."""


class PluginCall:
    """One call of a plug-in; as a context manager, turns the exceptions of the plug-in into PluginFailed.

    A ConfigError passes unchanged, and so does a MemoryError, which no plug-in causes alone.
    """

    __slots__ = ("_item", "_method", "_noun", "_plugin", "_section")

    def __init__(self, section: str, plugin: object, method: str, item: str = "", noun: str = "problem") -> None:
        """``method`` ends in parentheses unless it is an attribute. ``item`` is the ``noun`` that the call is about."""
        self._section, self._plugin, self._method = section, plugin, method
        self._item, self._noun = item, noun

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception) or isinstance(error, (ConfigError, MemoryError, PluginFailed)):
            return
        text = " ".join(str(error).split())
        if isinstance(error, OSError) and text:
            raise PluginUnavailable(self.describe(f"failed{self._about}: {text}")) from error
        reason = f"{type(error).__name__}: {text}".removesuffix(": ")
        message = self.describe(f"failed{self._about}: {reason}")
        inside = traceback.extract_tb(frames)[1:]  # the first frame is that of the caller
        shown = "".join(traceback.format_list(inside[-_MAX_FRAMES:]))
        raise PluginFailed(f"{message}\n{shown}".rstrip()) from error

    def describe(self, what: str) -> str:
        """Make a message that begins with the call: ``reward my_reward:Brief: price() failed ...``."""
        cls = type(self._plugin)
        name = f"{self._section} {cls.__module__}:{cls.__qualname__}".lstrip()
        return f"{name}: {self._method} {what}"

    def refuse_value(self, value: object, expected: str) -> ConfigError:
        """Make the error about a value that is not ``expected``."""
        verb, remedy = "is", f"it must be {expected}"
        if self._method.endswith(")"):
            verb, remedy = "returned", f"it must return {expected}"
        shown = quote_value(value)
        if inspect.iscoroutine(value):
            value.close()  # or Python warns that it was never awaited
            shown, remedy = "a coroutine", f"{remedy}: write def instead of async def"
        return ConfigError(self.describe(f"{verb} {shown}{self._about}; {remedy}"))

    def refuse(self, fault: str, remedy: str) -> ConfigError:
        """Make the error about a part of a value. In the message, ``fault`` follows the name of the method."""
        return ConfigError(self.describe(f"{fault}{self._about}; {remedy}"))

    @property
    def _about(self) -> str:
        return f" for {self._noun} {quote_value(self._item)}" if self._item else ""

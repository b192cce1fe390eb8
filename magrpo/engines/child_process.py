"""The supervised child process of an engine: its death is an EngineError."""

from magrpo.engines import EngineError
from magrpo.fleets import ProcessDied, process


class Child(process.Child):
    """See :class:`magrpo.fleets.process.Child`."""

    def send(self, message: bytes) -> None:
        try:
            super().send(message)
        except ProcessDied as error:
            raise EngineError(str(error)) from None

    def receive(self) -> bytes:
        try:
            return super().receive()
        except ProcessDied as error:
            raise EngineError(str(error)) from None

"""Runs the code of candidates and testers in the zygote, before it forks any, on a program of its own.

Python adapts code that runs repeatedly. Adapted once here, it stays as it is in every process forked later, which
would otherwise adapt it again, and for that copy the memory it stands in.
"""

import marshal
import sys
from typing import Any

from . import recorder, wire
from .candidate import MODULE, CandidateProgram
from .exports import check_operation, grant
from .peer import Peer
from .proxy import EntryPoint, check_answer
from .surroundings import Surroundings
from .values import find_library_name

ROUNDS = 20
TEST = marshal.dumps(compile("for n in range(3):\n    candidate(n)", "<test>", "exec"))


class InProcess(recorder.Callee):
    """A candidate in this process, asked through frames as if it were in another."""

    def __init__(self) -> None:
        super().__init__()
        program = CandidateProgram(lambda *_: None, "def f(n):\n    return n\n", "f", "")
        target, self.surroundings = program.load(), Surroundings()

        def ask(operation: str, arguments: tuple[Any, ...]) -> Any:
            self.surroundings.list_changes()
            question = wire.parse_frame(wire.frame_message([1, operation, *peer.write_question(arguments)])[4:])
            reply = wire.parse_frame(wire.frame_message([1, *program.answer(*question[1:])])[4:])
            status, value, changes, _ = check_answer(reply, 1)
            return peer.read_answer(status, value, changes)

        peer = Peer(ask, grant, check_operation, find_name=find_library_name)
        self.target = peer.read_answer("ok", target, [])
        self.peer = peer
        self.entry = EntryPoint(self)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See :class:`magrpo.sandboxes.jail.proxy.Proxy`."""
        result = self.peer.ask("call", (self.target, args, tuple(kwargs.items())))
        self.note_value(result)
        return result


def warm_up() -> None:
    """Judge a plain program several times."""
    for _ in range(ROUNDS):
        callee = InProcess()
        recorder.run_test_code(TEST, "f", callee, {})
        callee.surroundings.close()
    del sys.modules[MODULE], sys.modules["test"]

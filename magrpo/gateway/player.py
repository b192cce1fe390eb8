"""Plays a batch of episodes: programs run beside each other, and the engine samples what they ask for in batches."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from magrpo.envs.program import AgentProgram
from magrpo.gateway.batcher import Batcher
from magrpo.gateway.chat import Chat
from magrpo.gateway.forkserver import RAISED
from magrpo.gateway.launcher import Ended, Launcher
from magrpo.gateway.server import Gateway, LiveSession, Stage
from magrpo.gateway.sessions import EpisodeTask, Session
from magrpo.interfaces import Env
from magrpo.seeds import derive_seed
from magrpo.types import Action, Call, EpisodeStatus, Execution, ExecutionReport, Request

if TYPE_CHECKING:
    from magrpo.model.lineup import Lineup

ResultT = TypeVar("ResultT")
_POLL_S = 0.5
"""Time between two looks at the clock of a program."""
_MAX_SHOWN = 500
"""Longest reason for a failure that is kept, in characters."""
_KILL_S = 10.0
"""Time to wait for the end of a program that was killed."""


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """An episode as it ended. ``result``: what its program returned, if it finished."""

    calls: tuple[Call, ...]
    status: EpisodeStatus
    message: str = ""
    result: Any = None


@dataclass(frozen=True)
class Services:
    """What a stage provides to episodes. The functions are called in the thread of the stage."""

    agents: Mapping[str, str]
    """The agent that answers for each role, in the order of the configuration."""
    generate: Callable[[list[Request]], list[Action]]
    run_programs: Callable[[list[Execution]], list[ExecutionReport]]
    advance: Callable[[int], None]
    """Takes the number of episodes just finished; may raise, to abort the stage."""


@dataclass
class _Play:
    """The state of one batch of episodes."""

    services: Services
    jobs: SimpleQueue[Callable[[], None] | None] = field(default_factory=SimpleQueue)
    """Work for the thread of the stage; None: the episodes have ended."""
    sessions: dict[str, LiveSession] = field(default_factory=dict)
    """All sessions by token, also those that were sealed: late requests are refused until the batch has ended."""
    live: list[LiveSession] = field(default_factory=list)
    """The sessions whose programs may still ask."""

    async def compute(self, work: Callable[[list[Any]], list[Any]], batch: list[Any]) -> list[Any]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[Any]] = loop.create_future()

        def finish(results: list[Any]) -> None:
            if not future.done():  # the play may have been cancelled meanwhile
                future.set_result(results)

        def run() -> None:
            loop.call_soon_threadsafe(finish, work(batch))

        self.jobs.put(run)
        return await future

    def everyone_waits(self) -> bool:
        return all(live.session.num_waiting for live in self.live)


class EpisodePlayer:
    """Plays the episodes of one program. Gateway and fork server stay open from one batch to the next.

    ``get_time``: the clock, in seconds, by which ``env.time_limit_s`` is measured.
    """

    def __init__(self, env: AgentProgram, lineup: Lineup, get_time: Callable[[], float] = time.monotonic) -> None:
        self._env = env
        self._get_time = get_time
        self._gateway = Gateway(env, Chat(lineup, env.response_template))
        self._launcher = Launcher(env)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gateway", daemon=True)
        self._thread.start()
        self._call(self._gateway.start())

    def play(self, tasks: Sequence[EpisodeTask], services: Services) -> list[PlayedEpisode]:
        """Play episodes, in the order of ``tasks``; engine and sandbox work in the calling thread.

        Raises PluginFailed if the program cannot be imported, EpisodesLost if the process that runs episodes died, and
        whatever engine, sandbox and ``services.advance`` raise; no program runs on then.
        """
        play = _Play(services)
        playing = self._call(self._start_play(tasks, play))
        try:
            while (job := play.jobs.get()) is not None:
                job()
        except BaseException:  # of the engine, the sandbox or the user: no program may outlive it
            self._loop.call_soon_threadsafe(playing.cancel)
            while play.jobs.get() is not None:
                pass  # until the programs are gone
            raise
        return playing.result()

    def close(self) -> None:
        """Kill every program and stop the server. May be called twice."""
        if self._thread.is_alive():
            self._call(self._launcher.close())
            self._call(self._gateway.stop())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _call(self, coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _start_play(self, tasks: Sequence[EpisodeTask], play: _Play) -> asyncio.Task[list[PlayedEpisode]]:
        playing = asyncio.ensure_future(self._play(tasks, play))
        playing.add_done_callback(lambda _: play.jobs.put(None))
        return playing

    async def _play(self, tasks: Sequence[EpisodeTask], play: _Play) -> list[PlayedEpisode]:
        await self._launcher.start()
        services = play.services
        completions: Batcher[Request, Action] = Batcher(
            partial(play.compute, services.generate), play.everyone_waits, self._env.batch_wait_s
        )
        programs: Batcher[Execution, ExecutionReport] = Batcher(
            partial(play.compute, services.run_programs), play.everyone_waits, self._env.batch_wait_s
        )
        stage = Stage(services.agents, completions, programs, self._gateway.chat.lineup.max_length)
        slots = asyncio.Semaphore(self._env.concurrency)
        batchers = [asyncio.ensure_future(batcher.run()) for batcher in (completions, programs)]
        episodes = [asyncio.ensure_future(self._play_episode(task, play, stage, slots)) for task in tasks]
        try:
            return list(await asyncio.gather(*episodes))
        finally:
            answers = [answer for live in play.sessions.values() for answer in live.answers]
            running: list[asyncio.Future[Any]] = [*episodes, *batchers, *answers]
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            for token in play.sessions:
                del self._gateway.sessions[token]

    async def _play_episode(
        self, task: EpisodeTask, play: _Play, stage: Stage, slots: asyncio.Semaphore
    ) -> PlayedEpisode:
        async with slots:
            token = secrets.token_urlsafe(18)
            session = Session(task, list(stage.roles.values()), self._env.max_calls, get_time=self._get_time)
            live = LiveSession(session, stage)
            self._gateway.sessions[token] = play.sessions[token] = live
            play.live.append(live)
            order = {
                "url": f"{self._gateway.url}/s/{token}",
                "token": token,
                "agents": list(stage.roles),
                "seed": derive_seed(task.seed, "program", task.problem.task_id, task.index),
            }
            number, ended = self._launcher.run(task.problem, order)
            try:
                await self._launcher.send_orders()
                played = self._read_end(await self._wait_for_end(live.session, ended), live)
                calls = await self._seal(live, play)
            finally:
                live.session.is_sealed = True
                if not ended.done():
                    self._launcher.kill(number)
                    await asyncio.wait({ended}, timeout=_KILL_S)
                self._launcher.forget(number, ended.result() if _has_result(ended) else None)
        play.jobs.put(partial(play.services.advance, 1))
        return PlayedEpisode(calls, *played)

    async def _wait_for_end(self, session: Session, ended: asyncio.Future[Ended]) -> Ended | None:
        """The end of a program; None if it took too long, not counting the time in which it waits."""
        started = self._get_time()
        while True:
            limit = self._env.time_limit_s
            done, _ = await asyncio.wait({ended}, timeout=min(_POLL_S, limit))
            if done:
                return ended.result()
            if session.num_waiting == 0 and self._get_time() - started - session.waited_s > limit:
                return None

    def _read_end(self, ended: Ended | None, live: LiveSession) -> tuple[EpisodeStatus, str, Any]:
        """The status of an episode, the reason if it did not finish, and the result of its program."""
        if live.session.infra_error:
            return "infra_error", live.session.infra_error, None
        if ended is None:
            return "timed_out", f"took longer than env.time_limit_s = {self._env.time_limit_s:g}", None
        status = ended.exit_status
        if status != 0:
            last = self._launcher.read_failure(ended)[:_MAX_SHOWN]
            if status == RAISED:
                return "failed", last, None
            how = f"signal {-status}" if status < 0 else f"exit status {status}"
            return "failed", f"{how}: {last}".removesuffix(": "), None
        try:
            result = self._launcher.read_result(ended)
        except ValueError as error:
            return "failed", str(error), None
        if not live.session.num_asked:
            return "silent", "asked no agent", None
        return "finished", "", result

    async def _seal(self, live: LiveSession, play: _Play) -> tuple[Call, ...]:
        """End a session once its last completions are sampled; they count, though nobody reads them."""
        play.live.remove(live)  # it asks for nothing more, so no batch waits for it
        live.session.is_sealed = True
        if live.answers:
            await asyncio.wait(live.answers)
        return live.session.seal()


@contextmanager
def open_player(env: Env, lineup: Lineup) -> Iterator[EpisodePlayer | None]:
    """The player of a program for the length of a block; None for any other environment."""
    if not isinstance(env, AgentProgram):
        yield None
        return
    with closing(EpisodePlayer(env, lineup)) as player:
        yield player


def _has_result(future: asyncio.Future[Any]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None

"""The broker's loop: sockets, clocks and pidfds feed the decisions of ``state.py``, and their outputs are carried out.

One thread. Device work is handed to a second one, whose results come back as inputs; nothing here blocks for longer
than a small file takes. A turn is at most 20 ms away: then life words are looked at (a robust word says that a process
is dying 0.1 ms after the kill, whatever its size) and the clock ticks. Sockets are drained before every tick, so that
nobody's silence is counted while what he said lies in a queue.
"""

from __future__ import annotations

import os
import queue
import select
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path

import zmq

from ipcsync import errors, keys, linux, runtime, wire
from ipcsync.ledger import Block, Header

from .doors import Door, Gate, Inlet, KeyedDoor, Listener, Publisher, Pulse, connections
from .journal import Journal
from .logs import LOG, announced
from .model import (
    Announce,
    Answer,
    Do,
    Done,
    Dying,
    Gone,
    Input,
    Leave,
    LedgerLost,
    Next,
    Output,
    Persist,
    Received,
    Session,
    Stop,
    Tick,
    Watch,
)
from .resources import Resources, failpoint
from .sessions import local_pid
from .state import State
from .systemd import Watchdog, notify

TURN = 0.05  # seconds from one look at the life words to the next
BURST = 500  # messages read in one turn at most: a flood does not keep the clock from ticking


class Server:
    """Serves until SIGTERM, SIGINT or ``Leave``. `lock` is held, `resources` and `state` belong to `directory`."""

    def __init__(
        self,
        directory: Path,
        lock: runtime.Lock,
        state: State,
        resources: Resources,
        journal: Journal,
        *,
        tcp: str | None = None,
    ) -> None:
        self.directory, self.lock, self.state, self.resources, self.journal = directory, lock, state, resources, journal
        self.failed = ""  # why it had to leave
        self.boot = state.boot
        self.leaving = False
        self.catch_up_at = 0.0  # when the journal is tried again
        self.watchdog = Watchdog()
        self.pending: deque[Input] = deque()
        self.lives: list[tuple[int, int]] = []  # life words of the sessions watched
        self.watched: dict[int, int] = {}  # session -> pidfd, -1 where pids mean nothing
        self.by_fd: dict[int, int] = {}
        self.jobs: queue.SimpleQueue[Do | None] = queue.SimpleQueue()
        self.results: deque[Done] = deque()
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.poller = select.epoll()
        self.poller.register(self.bell, select.EPOLLIN)
        for number in (signal.SIGTERM, signal.SIGINT):  # before the bind: who can reach us may end us in order
            signal.signal(number, lambda *_: self._ask_to_stop())
        self.context = zmq.Context(io_threads=1)
        self.doors: dict[bytes, Door] = {}
        self.inlets: dict[int, Inlet] = {}
        self.context.set(zmq.MAX_SOCKETS, 65_536)
        most = connections(3 if tcp is None else 4, state.quotas.sessions)
        if tcp is not None:  # first: it may be refused
            self.doors[KeyedDoor.tag] = door = KeyedDoor(self.context, tcp, keys.folder(), most)
            self.inlets[door.gate.fd] = door.gate
            LOG.info("also at %s, with the public key %s", door.endpoint, door.public)
        self.doors[Door.tag] = Door(self.context, runtime.broker_endpoint(directory), state.uids, most)
        self.pub = Publisher(self.context, runtime.announce_endpoint(directory), state.uids, most)
        resources.pulse = Pulse(self.context, runtime.pulse_endpoint(directory), state.uids, most)
        self.listeners: list[Listener] = [*self.doors.values(), self.pub, resources.pulse]
        self.inlets |= {each.fd: each for each in (*self.doors.values(), resources.pulse)}
        self.inlets |= {each.monitor.fd: each.monitor for each in self.listeners}
        self.ours = self._inodes()
        for fd in self.inlets:
            self.poller.register(fd, select.EPOLLIN)
        self.worker = threading.Thread(target=self._work, name="ipcsync-devices", daemon=True)

    # -- the loop

    def serve(self, ready: Callable[[], None]) -> None:
        """Returns when the broker has left; `ready` is called once it can be reached."""
        self.worker.start()
        notify("READY=1")
        ready()
        LOG.info("serving %s", self.directory)
        words = self.resources.words
        words[Header.STATE] = Header.SERVING
        turn = 0.0
        try:
            while not self.leaving:
                self._receive()
                self._take_results()
                now = time.monotonic()
                if now >= turn:
                    self.state.lateness.add(now - turn if turn else 0.0)
                    turn = now + TURN
                    words[Header.TICK] = time.monotonic_ns()
                    self._look()
                    if self.state.due(now):
                        self._check_files()
                        for listener in self.listeners:
                            self.state.counts.update(listener.refused())
                        self._catch_up(now)
                        self.feed(Tick())
                    self.watchdog.turn(now)
                if not any(inlet.stirred for inlet in self.inlets.values()):
                    self._sleep(max(0.0, turn - time.monotonic()))
        finally:
            words[Header.STATE] = Header.STOPPING
            for number in (signal.SIGTERM, signal.SIGINT):  # a second one must not end us half-way out
                signal.signal(number, signal.SIG_IGN)
            self.close()

    def _inodes(self) -> dict[str, int]:
        found = {}
        for name in (runtime.LEDGER, runtime.SOCKET, runtime.ANNOUNCE, runtime.PULSE):
            try:
                found[name] = os.stat(self.directory / name, follow_symlinks=False).st_ino
            except OSError:
                found[name] = 0
        return found

    def _check_files(self) -> None:
        """Somebody may remove or replace our files. Without them nobody new can come: we say so and leave."""
        if self.failed:
            return
        if not self.lock.held():  # another broker may write this ledger: not another word from us
            self.failed = "its lock was removed or replaced"
            self.leaving = True
            return
        now = self._inodes()
        lost = [name for name, inode in self.ours.items() if now[name] != inode]
        if lost:
            self.failed = f"{' and '.join(lost)} was removed or replaced"
            self.feed(LedgerLost() if runtime.LEDGER in lost else Stop())

    def _ask_to_stop(self) -> None:
        self.pending.append(Stop())  # a signal handler: it runs between two bytecodes of the loop itself
        os.eventfd_write(self.bell, 1)

    def _sleep(self, seconds: float) -> None:
        for fd, _ in self.poller.poll(seconds):
            if fd == self.bell:
                os.eventfd_read(fd)
            elif fd in self.by_fd:
                self.feed(Gone(self.by_fd[fd]))
            elif fd in self.inlets:
                self.inlets[fd].stirred = True

    def _receive(self) -> None:
        """Reads what is there, up to a burst."""
        for listener in self.listeners:
            if listener.due:
                listener.look()  # first: who is too many is not read
        for inlet in self.inlets.values():
            if not inlet.stirred:
                continue
            if isinstance(inlet, Gate):
                inlet.answer()
            elif isinstance(inlet, Door):
                self._drain(inlet)

    def _drain(self, door: Door) -> None:
        for _ in range(BURST):
            try:
                frames = door.receive()
            except zmq.ZMQError as error:
                if error.errno in (zmq.ETERM, zmq.ENOTSOCK):
                    raise
                self._bad("socket")
                continue
            if frames is None:
                return
            self._read(frames)

    def _read(self, frames: list[bytes]) -> None:
        """A message as it came: whatever it is, the loop goes on."""
        if len(frames) != 2:
            self._bad("frames")
            return
        peer, payload = frames
        try:
            request = wire.decode(payload, wire.Request)
        except errors.BadMessage:
            self._bad("undecodable")
            return
        refusal = self.doors[peer[:1]].refusal(peer)
        if refusal is None:
            self.feed(Received(peer, request))
        else:
            self._answer(Answer(peer, request.id, None, wire.failure(refusal)))

    def _bad(self, why: str) -> None:
        self.state.counts["bad_messages"] += 1
        self.state.counts[f"bad_messages.{why}"] += 1

    def _take_results(self) -> None:
        while self.results:
            self.feed(self.results.popleft())
        while self.pending:
            self.feed(self.pending.popleft())

    def _look(self) -> None:
        words = self.resources.words
        for at, number in self.lives:
            if words[at] & linux.OWNER_DIED:
                session = self.state.sessions[number]
                if session.state == "live":
                    self.feed(Dying(number))
        self.resources.tick()

    # -- in and out

    def feed(self, item: Input) -> None:
        """Has `item` decided on and its outputs carried out, with what follows from their results."""
        following: deque[Input] = deque([item])
        while following:
            for output in self._decide(following.popleft()):
                found = self._carry_out(output)
                if found is not None:
                    following.append(found)

    def _decide(self, item: Input) -> list[Output]:
        try:
            return self.state.handle(item, time.monotonic())
        except Exception:  # a mistake of ours in one request: everybody else is served on
            self.state.counts["broker_errors"] += 1
            log(f"{type(item).__name__}:\n{traceback.format_exc()}")
            if isinstance(item, Stop):
                self.leaving = True  # without a goodbye to everybody, but at once
            return []

    def _carry_out(self, output: Output) -> Input | None:
        match output:
            case Answer():
                self._answer(output)
            case Announce(namespace, kind, body, seq):
                failpoint("broker.publish")
                announced(namespace, kind, body)
                message = wire.Announcement(wire.PROTOCOL_MAX, self.boot, seq, kind, body)
                self.pub.send(namespace.encode(), wire.encode(message))
            case Do(effect, token):
                if self.resources.slow(effect):
                    self.jobs.put(output)
                else:
                    done = self._apply(output)
                    return done if token else None
            case Persist():
                failpoint("journal.write")
                self._write_down(output)
            case Watch(number, on):
                if on:
                    return self._watch(number)
                self._unwatch(number)
            case Next(item):
                return item
            case Leave():
                self.leaving = True
        return None

    def _write_down(self, entry: Persist) -> None:
        try:
            self.journal.append(entry.changes)
        except OSError as error:  # OutOfSpace is one: tried again each second; until then a restart loses some
            self.state.counts["journal_failures"] += 1
            log(f"journal: {error}")

    def _catch_up(self, now: float) -> None:
        if self.journal.behind and now >= self.catch_up_at:
            self.catch_up_at = now + 1.0
            try:
                self.journal.catch_up()
                log("journal: there is room again, and everything is written down")
            except OSError:
                pass  # said before

    def _answer(self, answer: Answer) -> None:
        reply = wire.Reply(
            wire.PROTOCOL_MAX, answer.id, self.boot, answer.error is None, answer.body or {}, answer.error
        )
        try:
            self.doors[answer.peer[:1]].send(answer.peer, wire.encode(reply))
        except zmq.ZMQError:  # it is gone, or does not read
            self.state.counts["unsent_answers"] += 1

    def _apply(self, job: Do) -> Done:
        try:
            return Done(job.token, self.resources.apply(job.effect))
        except Exception as error:
            if not isinstance(error, errors.IpcSyncError):
                self.state.counts["broker_errors"] += 1
                log(f"{type(job.effect).__name__}: {type(error).__name__}: {error}")
            return Done(job.token, None, error)

    def _work(self) -> None:
        """The worker thread: device work, in order."""
        while (job := self.jobs.get()) is not None:
            done = self._apply(job)
            if job.token:
                self.results.append(done)
                os.eventfd_write(self.bell, 1)

    # -- processes

    def _watch(self, number: int) -> Input | None:
        session = self.state.sessions.get(number)
        if session is None:
            return None  # it came and went in one turn
        ledger = self.resources.ledger
        self.lives.append((ledger.block(session.block) + Block.LIFE, number))
        pid = local_pid(self.state, session)
        if pid == 0:
            self.watched[number] = -1  # its life word says that it is dying, its file's lock that it is gone
            return None
        if pid is None:
            return Gone(number)
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return Gone(number)
        if not self._same(session, pid):
            os.close(fd)
            return Gone(number)
        self.watched[number] = fd
        self.by_fd[fd] = number
        self.poller.register(fd, select.EPOLLIN)
        return None

    def _same(self, session: Session, pid: int) -> bool:
        """Whether the pid that we just took hold of is still the session's."""
        if session.pid_namespace != self.state.pid_namespace:
            return local_pid(self.state, session) == pid
        return linux.start_time(pid) == session.start

    def _unwatch(self, number: int) -> None:
        self.lives = [life for life in self.lives if life[1] != number]
        fd = self.watched.pop(number, -1)
        if fd >= 0:
            self.poller.unregister(fd)
            del self.by_fd[fd]
            os.close(fd)

    # -- the end

    def close(self) -> None:
        """Everybody was told; what was sent goes out, and what nobody needs any more is removed."""
        notify("STOPPING=1")
        self.jobs.put(None)
        self.worker.join(5.0)
        for listener in self.listeners:
            listener.close()
        self.context.term()
        for number in list(self.watched):
            self._unwatch(number)
        self.poller.close()
        os.close(self.bell)
        for path in (runtime.SOCKET, runtime.ANNOUNCE, runtime.PULSE) if self.lock.held() else ():
            (self.directory / path).unlink(missing_ok=True)


def log(text: str) -> None:
    LOG.warning("%s", text)

"""Condemning while no broker is there (LEDGER.md rule 8): a waiter that sees its recorder die does it in its stead."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from . import condemn, errors, failpoints, runtime
from .ledger import Block, Cell, Header, Ledger
from .link import Link

_suspecting = threading.Lock()  # the broker's lock is the process's, not the thread's


class Stead:
    """What a session does for others while the broker of its directory is not there."""

    def __init__(self, directory: Path, ledger: Ledger, link: Link) -> None:
        self._directory, self._ledger, self._link = directory, ledger, link
        self._words = ledger.words

    def suspect(self, block: int) -> bool:
        """A waiter saw that the owner of this block is dying. The broker sees it too; without one, we condemn in its
        stead. False when nobody does: the broker is there, but its loop stands still."""
        return self._in_the_brokers_stead(lambda: self._condemn_dead(block))

    def finish_condemning(self) -> None:
        """A condemnation is under way. Should its author have died in it, a waiter as we are, and no broker be there,
        it is completed here: else nobody would condemn the rest of the chain, or let go who waits for the dead."""
        if self._words[Header.CONDEMNING] & 1:
            self._in_the_brokers_stead(self._finish_begun)

    def _in_the_brokers_stead(self, condemn: Callable[[], None]) -> bool:
        """Condemns with the broker's lock held, so that nobody else does, if no broker is there."""
        if not _suspecting.acquire(blocking=False):
            return True  # another thread is at it
        try:
            if runtime.broker_pid(self._directory) is not None:
                return self._link.alive()
            lock = runtime.Lock(self._directory)
            try:
                lock.acquire()
            except errors.BrokerRunning:
                return True
            try:
                condemn()
            finally:
                lock.release()
            return True
        finally:
            _suspecting.release()

    def _condemn_dead(self, block: int) -> None:
        if not self._ledger.dying(block):
            return
        who = condemn.Culprit(Cell.DIED, *self.owner(block))
        condemn.finish_begun(self._ledger, who)
        condemn.condemn(self._ledger, condemn.recorded_by(self._ledger, block), who, failpoint=failpoints.hit)

    def _finish_begun(self) -> None:
        for block in range(self._ledger.sessions):
            self._condemn_dead(block)
        condemn.finish_begun(self._ledger, condemn.Culprit(Cell.DIED))

    def owner(self, block: int) -> tuple[int, int, str]:
        """(session, pid, name) of whose block it is."""
        at = self._ledger.block(block)
        words = self._words
        return words[at + Block.SESSION], words[at + Block.PID], self._ledger.read_text(at + Block.NAME)

    def dead(self, block: int, name: str, round: int) -> errors.PeerDied:
        """What a waiter raises that sees its recorder dead, where no verdict will come."""
        _, pid, who = self.owner(block)
        return errors.PeerDied(
            f"session {who!r} (pid {pid}) died, and the broker does not answer: round {round} of {name!r} will not be "
            "true; restart the broker",
            session=who,
            pid=pid,
            round=round,
            name=name,
        )

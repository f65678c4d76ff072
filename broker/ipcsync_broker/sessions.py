"""Who is there: hello, beats, goodbyes and deaths."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ipcsync import errors, ledger, wire

from . import names, pens, recovery
from .model import LEASE, QUIET, DropReader, Gone, Next, Scavenge, Session, SetBlock, Watch

if TYPE_CHECKING:
    from .state import Call, State


def hello(state: State, peer: bytes, body: wire.Hello) -> wire.Welcome:
    _check_versions(state, body)
    _check_process(state, body)
    if state.stopping:
        raise errors.BrokerUnavailable("the broker is stopping")
    known = state.sessions.get(body.session)
    same = known is not None and known.pid == body.pid and known.start == body.start
    if same and known is not None and known.state == "live":
        # What it says it holds is not held against it: an answer may be on its way to the thread that asked, and a
        # thing taken from who has it is worse than one kept for who has let it go. Its requests are sent again.
        if known.lock != body.lock:
            known.lock = body.lock
            state.mark(known)
        if known.away:
            known.away = False
            state.announce(
                known.namespace, "session", session=known.number, name=known.name, pid=known.pid, state="back"
            )
        return _welcome(state, peer, known, body, resumed=True)
    if peer in state.peers:
        raise errors.InvalidState("this connection said hello before")
    if not state.free_blocks:
        raise errors.QuotaExceeded(
            f"this broker serves {state.quotas.sessions} sessions and has as many: raise --max-sessions",
            resource="sessions",
            limit=state.quotas.sessions,
        )
    state.last_session += 1
    session = Session(
        number=state.last_session,
        block=state.free_blocks.popleft(),
        name=body.name,
        namespace=body.namespace,
        pid=body.pid,
        start=body.start,
        uid=body.uid,
        pid_namespace=body.pid_namespace,
        lock=body.lock,
    )
    state.sessions[session.number] = session
    state.mark(session)
    state.do(SetBlock(session.block, "live", session))
    state.out.append(Watch(session.number))
    state.announce(session.namespace, "session", session=session.number, name=session.name, pid=session.pid, state="up")
    return _welcome(state, peer, session, body, resumed=False)


def _check_versions(state: State, body: wire.Hello) -> None:
    if body.protocol_min > wire.PROTOCOL_MAX or body.protocol_max < wire.PROTOCOL_MIN:
        raise errors.ProtocolMismatch(
            f"ipcsync {body.version} speaks protocol {body.protocol_min} to {body.protocol_max}, the broker "
            f"({state.version}) {wire.PROTOCOL_MIN} to {wire.PROTOCOL_MAX}: run versions that share one",
            theirs=body.protocol_max,
            ours=wire.PROTOCOL_MAX,
        )
    if body.layout != ledger.LAYOUT:
        raise errors.ProtocolMismatch(
            f"ipcsync {body.version} reads ledger layout {body.layout}, the broker ({state.version}) writes "
            f"{ledger.LAYOUT}: run versions that share one",
            theirs=body.layout,
            ours=ledger.LAYOUT,
        )


def _check_process(state: State, body: wire.Hello) -> None:
    """Only in our own pid namespace does a pid name a process that can be looked at."""
    if state.boot_id and body.boot_id != state.boot_id:
        state.counts["refused_machines"] += 1
        raise errors.Unsupported(
            "this broker runs on another machine (another kernel): sessions share its memory, so they run where it does"
        )
    if body.uid not in state.uids:
        state.counts["refused_uids"] += 1
        raise errors.PermissionDenied(f"uid {body.uid} may not use this broker")
    if body.pid_namespace != state.pid_namespace:
        return
    found = state.facts.process(body.pid)
    if found is None or found[1] != body.start:
        raise errors.InvalidArgument(f"there is no process {body.pid} that started at {body.start}")
    if found[2] != body.uid:
        state.counts["refused_uids"] += 1
        raise errors.PermissionDenied(f"process {body.pid} belongs to uid {found[2]}, not {body.uid}")


def _welcome(state: State, peer: bytes, session: Session, body: wire.Hello, *, resumed: bool) -> wire.Welcome:
    before = state.peer_of.get(session.number)
    if before is not None:
        state.peers.pop(before, None)
    state.peers[peer] = session.number
    state.peer_of[session.number] = peer
    state.heard[session.number] = state.now
    state.served = True
    return wire.Welcome(
        protocol=min(body.protocol_max, wire.PROTOCOL_MAX),
        session=session.number,
        block=session.block,
        boot=state.boot,
        seq=state.seq,
        ledger=state.ledger,
        announce=state.announce_at,
        lease=LEASE,
        version=state.version,
        resumed=resumed,
    )


def beat(state: State, call: Call, body: wire.Beat) -> wire.Empty:
    return wire.Empty()


def suspect(state: State, call: Call, body: wire.Suspect) -> wire.Empty:
    for session in list(state.sessions.values()):
        if session.block == body.block and session.state == "live" and state.facts.dying(body.block):
            die(state, session)
    return wire.Empty()


def bye(state: State, call: Call, body: wire.Bye) -> wire.Empty:
    if call.session.state == "live":  # else it was taken for dead: what it held is freed when its process is gone
        say_goodbye(state, call.session)
    return wire.Empty()


def say_goodbye(state: State, session: Session) -> None:
    """The session has drained what it could; what is left is treated as a death."""
    session.state = "left"
    _disconnect(state, session)
    left = pens.give_back_all(state, session)
    for incarnation, cell in session.readers:
        state.do(DropReader(state.things[incarnation], cell, "dying"))
        left = True
    state.announce(
        session.namespace, "session", session=session.number, name=session.name, pid=session.pid, state="left"
    )
    if left:
        session.state = "dying"
    names.creator_ended(state, session)
    if session.state == "left" and not state.facts.waiting(session.block):
        end(state, session)
    else:
        state.mark(session)
        state.do(SetBlock(session.block, "dying"))


def die(state: State, session: Session) -> None:
    """Its I/O thread is gone: whoever waits for it is told now. Its memory stays until the process is gone."""
    if session.state == "dying":
        return
    state.counts["deaths"] += 1
    _end_its_work(state, session, ledger.Cell.DIED, "died")


def lease_out(state: State, session: Session) -> None:
    """It is stopped and silent. Its rounds end, its handles are stale, and nothing of it is given to others."""
    session.leased_out = True
    state.counts["leases_out"] += 1
    state.do(SetBlock(session.block, "leased"))
    _end_its_work(state, session, ledger.Cell.SILENT, "silent")


def _end_its_work(state: State, session: Session, cause: int, why: str) -> None:
    was_live = session.state == "live"
    session.state = "dying"
    state.mark(session)
    state.do(SetBlock(session.block, "dying"))
    _drop_parked(state, session)
    pens.condemn_all(state, session, cause)
    for incarnation, cell in session.readers:
        state.do(DropReader(state.things[incarnation], cell, "silent" if session.leased_out else "dying"))
    if was_live:
        state.announce(
            session.namespace, "session", session=session.number, name=session.name, pid=session.pid, state=why
        )
    names.creator_ended(state, session)


def gone(state: State, session: Session) -> None:
    """The process is gone for good: what it held is nobody's any more."""
    if session.state in ("live", "left"):
        die(state, session)
        state.out.append(Next(Gone(session.number)))
    else:
        end(state, session, process_gone=True)


def end(state: State, session: Session, *, process_gone: bool = False) -> None:
    """Nothing of this session can touch anything any more."""
    _disconnect(state, session)
    for incarnation, cell in session.readers:
        state.do(DropReader(state.things[incarnation], cell, "gone"))
    session.readers = set()
    pens.drop_all(state, session)
    for incarnation in list(session.attached):
        names.release(state, session, state.things[incarnation])
    state.out.append(Watch(session.number, on=False))
    state.do(SetBlock(session.block, "free"))
    state.do(Scavenge(session, process_gone))
    del state.sessions[session.number]
    state.heard.pop(session.number, None)
    state.beats.pop(session.number, None)
    state.free_blocks.append(session.block)
    state.mark(session)


def _disconnect(state: State, session: Session) -> None:
    peer = state.peer_of.pop(session.number, None)
    if peer is not None:
        state.peers.pop(peer, None)
    _drop_parked(state, session)


def _drop_parked(state: State, session: Session) -> None:
    state.parked = [p for p in state.parked if p.call.session is not session]


def look_after(state: State) -> None:
    """Each tick: the silent are looked at, the dying released again, the left seen off."""
    for session in list(state.sessions.values()):
        if session.lock and local_pid(state, session) is None:
            gone(state, session)
        elif session.state == "live":
            beat = state.facts.beat(session.block)
            if beat != state.beats.get(session.number, 0):
                state.beats[session.number] = beat
                state.heard[session.number] = state.now
            silence = state.now - state.heard.get(session.number, state.now)
            if silence > QUIET and _stopped(state, session) and silence > LEASE:
                lease_out(state, session)
            elif session.away and recovery.overdue(state, session):
                say_goodbye(state, session)
        elif session.state == "left":
            if not state.facts.waiting(session.block):
                end(state, session)
        elif not session.leased_out:
            for incarnation, cell in session.readers:
                state.do(DropReader(state.things[incarnation], cell, "dying"))


def _stopped(state: State, session: Session) -> bool:
    """A process that holds the GIL for long is not stopped, and not dead."""
    pid = local_pid(state, session)
    if pid == 0:
        return state.facts.silent(session.lock)
    found = state.facts.process(pid) if pid else None
    return found is not None and found[0] in "Tt"


def is_gone(state: State, session: Session) -> bool:
    """Whether its process is surely no more."""
    pid = local_pid(state, session)
    return pid is None or bool(pid and state.facts.process(pid) is None)


def local_pid(state: State, session: Session) -> int | None:
    """Its process's pid in our own pid namespace, 0 if it has none there; None: the file that it held locked is free,
    so it is gone."""
    return session.pid if session.pid_namespace == state.pid_namespace else state.facts.holder(session.lock)

"""An asyncio server with its work in two other processes: pre-processing and inference.

    python server.py [--port 0] [--device cpu]

It takes lines of JSON, ``{"id": 1, "text": "hello"}``, and answers ``{"id": 1, "letters": {"h": 1, ...}}``, or
``{"id": 1, "error": "..."}``. A client may have ROOM requests under way; more are not read from its connection until
one is answered. When a worker dies every client is told at once, and the server ends.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import signal
from multiprocessing import get_context

import ipcsync
from workers import BATCHES, LETTERS, ROOM, TEXT, infer, preprocess


class Front:
    """The side of the network. The event loop never waits for anything else than the network."""

    def __init__(self, session: ipcsync.Session, device: str) -> None:
        self.session = session
        self.requests = session.create_channel(
            "requests", shape=(TEXT,), dtype="uint8", depth=16, device="cpu"
        ).writer()
        session.create_channel("batches", fields=BATCHES, depth=2, device=device)
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.most = 0  # requests of one client that were under way at once
        self._numbers = itertools.count(1)
        self._writing = asyncio.Lock()

    async def watch(self, name: str) -> None:
        """Ends when that worker does: nobody ever records round 2, so all that can come of it is an error."""
        event = await asyncio.to_thread(self.session.open_event, f"{name}-lives")
        await event.synchronize_async(round=1)
        asyncio.create_task(self._until_dead(event)).add_done_callback(self._dead)

    async def _until_dead(self, event: ipcsync.SharedEvent) -> None:
        await event.synchronize_async(round=2, timeout=None)

    def _dead(self, task: asyncio.Task) -> None:
        if not task.cancelled() and not self.failed.done():
            self.failed.set_exception(task.exception() or RuntimeError("a worker ended"))

    async def client(self, lines: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        """One connection, with a reply channel of its own."""
        name = f"reply-{next(self._numbers)}"
        # ROOM requests at most are under way, so there is always a buffer for an answer: no client, however slow,
        # keeps the inference worker waiting.
        channel = self.session.create_channel(name, shape=(LETTERS,), dtype="int32", depth=ROOM + 1, device="cpu")
        room, waiting = asyncio.Semaphore(ROOM), set[int]()
        with channel, channel.reader() as replies:
            reading = asyncio.create_task(self._read(lines, name, room, waiting))
            answering = asyncio.create_task(self._answer(replies, out, room, waiting))
            try:
                await asyncio.wait({reading, answering, self.failed}, return_when=asyncio.FIRST_COMPLETED)
                for error in (task.exception() for task in (self.failed, answering, reading) if task.done()):
                    if error is not None:
                        for number in sorted(waiting):
                            out.write(_line(id=number, error=str(error)))
                        if not waiting:
                            out.write(_line(error=str(error)))
                        break
                await out.drain()
            except ConnectionError:
                pass  # it is gone
            finally:
                for task in (reading, answering):
                    task.cancel()
                await asyncio.gather(reading, answering, return_exceptions=True)
                out.close()
                if not self.failed.done():
                    await self._submit("", {"reply": name, "gone": True})  # the last that the worker hears of it

    async def _read(self, lines: asyncio.StreamReader, name: str, room: asyncio.Semaphore, waiting: set[int]) -> None:
        async for line in lines:
            request = json.loads(line)
            await room.acquire()  # the client's own back-pressure: until then no more is read
            waiting.add(request["id"])
            self.most = max(self.most, len(waiting))
            await self._submit(request["text"], {"reply": name, "id": request["id"]})
        for _ in range(ROOM):
            await room.acquire()  # it has sent its last, and gets its answers

    async def _submit(self, text: str, meta: dict) -> None:
        raw = text.encode()[:TEXT]
        async with self._writing:  # when all buffers are full, every client waits here, and the event loop does not
            await asyncio.to_thread(self._write, raw, meta)

    def _write(self, raw: bytes, meta: dict) -> None:
        with self.requests.slot(meta=meta, timeout=None) as slot:
            slot.resize(len(raw))
            slot.array[...] = bytearray(raw)

    async def _answer(
        self, replies: ipcsync.Reader, out: asyncio.StreamWriter, room: asyncio.Semaphore, waiting: set[int]
    ) -> None:
        async for slot in replies.slots_async(timeout=None):
            letters = {chr(ord("a") + i): int(n) for i, n in enumerate(slot.array) if n}
            number = slot.meta["id"]
            slot.release()
            out.write(_line(id=number, letters=letters))
            await out.drain()  # a client that does not read gets no further than this
            waiting.discard(number)
            room.release()


def _line(**what: object) -> bytes:
    return json.dumps(what).encode() + b"\n"


async def serve(session: ipcsync.Session, port: int, device: str) -> None:
    front, spawn = Front(session, device), get_context("spawn")
    processes = [
        spawn.Process(target=preprocess, name="preprocess"),
        spawn.Process(target=infer, args=(device,), name="infer"),
    ]
    for process in processes:
        process.start()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    for name in ("preprocess", "infer"):
        await front.watch(name)  # both are ready before anybody is let in
    clients: set[asyncio.Task] = set()

    async def client(lines: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        clients.add(asyncio.current_task())
        with contextlib.suppress(asyncio.CancelledError):
            await front.client(lines, out)

    server = await asyncio.start_server(client, "127.0.0.1", port)
    pids = " ".join(f"{process.name}={process.pid}" for process in processes)
    print(f"listening on {server.sockets[0].getsockname()[1]} {pids}", flush=True)
    ended = asyncio.create_task(stopped.wait())
    await asyncio.wait({ended, front.failed}, return_when=asyncio.FIRST_COMPLETED)
    server.close()
    if not front.failed.done():
        for task in clients:
            task.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    print(f"at most {front.most} requests of one client were under way", flush=True)
    if front.failed.done():
        for process in processes:
            process.terminate()
        raise SystemExit(f"a worker died: {front.failed.exception()}")
    front.requests.close()  # the workers read to the end, and leave
    for process in processes:
        await asyncio.to_thread(process.join)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--port", type=int, default=0)
    options.add_argument("--device", default=None)
    given = options.parse_args()
    with ipcsync.connect(start_broker=True, name="front") as session:
        asyncio.run(serve(session, given.port, given.device or ipcsync.Event().device.type))


if __name__ == "__main__":
    main()

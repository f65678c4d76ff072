"""The two workers of the server: one makes batches, one computes. Each runs in a process of its own.

A request is a text in a slot of the channel "requests", with ``{"reply": channel, "id": number}`` as its meta. The
answer goes to the channel that it names: one for each client.
"""

import signal

import ipcsync
from ipcsync import Field

ROOM = 8  # requests of one client that may be under way; its reply channel has a buffer for each
TEXT, BATCH = 256, 8  # bytes of a text; texts in a batch
LETTERS = 26

BATCHES = {"text": Field((BATCH, TEXT), "uint8"), "length": Field((BATCH,), "int32")}


def here(session: ipcsync.Session, name: str) -> None:
    """Says that this worker is ready, by round 1 of an event. Who waits for round 2 is told when the worker dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's, which ends the stream of requests
    session.create_event(f"{name}-lives", device="cpu").record()


def preprocess() -> None:
    """Requests in, batches out: as many as are there, up to BATCH, so that a batch never waits to be full."""
    with ipcsync.connect(name="preprocess") as session:
        batches = session.open_channel("batches").writer()
        requests = session.open_channel("requests").reader()
        here(session, "preprocess")
        with batches, requests:
            for first in requests.slots(timeout=None):
                taken = [first]
                while len(taken) < BATCH and requests.ready():
                    try:
                        taken.append(requests.get(timeout=0))
                    except ipcsync.EndOfStream:
                        break
                with batches.slot(meta={"rows": [slot.meta for slot in taken]}) as batch:
                    batch.resize("text", (len(taken), TEXT))
                    batch.resize("length", (len(taken),))
                    for row, slot in enumerate(taken):
                        n = slot.array.shape[0]
                        batch["text"][row, :n] = slot.array if batches.device.type == "cpu" else _upload(slot.array)
                        batch["length"][row] = n
                for slot in taken:
                    slot.release()


def _upload(array):
    import cupy

    return cupy.asarray(array)  # waits for the copy: the slot may be released


def infer(device: str) -> None:
    """Batches in, answers out. The model counts letters."""
    if device == "cpu":
        import numpy as xp
    else:
        import cupy as xp
    replies: dict[str, ipcsync.Writer] = {}
    with ipcsync.connect(name="infer") as session, session.open_channel("batches").reader() as batches:
        here(session, "infer")
        for batch in batches.slots(timeout=None):
            text, length = batch["text"] | 32, batch["length"]  # lower case
            inside = xp.arange(TEXT)[None, :] < length[:, None]
            is_letter = text[:, :, None] == xp.arange(ord("a"), ord("a") + LETTERS, dtype="uint8")
            counts = (is_letter & inside[:, :, None]).sum(axis=1, dtype="int32")
            answers = counts if device == "cpu" else counts.get()  # the host waits: answers leave for the network
            for answer, meta in zip(answers, batch.meta["rows"], strict=True):
                name = meta["reply"]
                if meta.get("gone"):
                    if name in replies:
                        replies.pop(name).channel.close()
                    continue
                if name not in replies:
                    try:
                        replies[name] = session.open_channel(name, timeout=0).writer()
                    except ipcsync.NotFound:
                        continue  # the client has left
                with replies[name].slot(meta={"id": meta["id"]}) as slot:
                    slot.array[...] = answer

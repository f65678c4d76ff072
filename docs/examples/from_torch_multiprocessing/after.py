"""A decoder process makes frames, the parent averages them. With ipcsync."""

import sys
from multiprocessing import get_context

import torch

import ipcsync
from ipcsync.torch import Queue


def decoder(frames: Queue, device: str) -> None:
    with frames:  # its end is the queue's
        for number in range(20):
            frame = torch.full((3, 480, 640), float(number), device=device)
            frames.put(frame, meta={"number": number})


def main(device: str) -> None:
    with ipcsync.connect(start_broker=True) as session:
        frames = Queue(session, "frames", like=torch.empty(3, 480, 640, device=device), depth=4)
        process = get_context("spawn").Process(target=decoder, args=(frames, device))
        process.start()
        for item in frames:
            print(item.meta["number"], f"{item.tensors.mean().item():g}")
        process.join()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cuda" if torch.cuda.is_available() else "cpu")

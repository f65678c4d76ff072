"""A decoder process makes frames, the parent averages them. With torch.multiprocessing."""

import sys

import torch
import torch.multiprocessing as mp


def decoder(frames: mp.Queue, taken: mp.Semaphore, device: str) -> None:
    for number in range(20):
        frame = torch.full((3, 480, 640), float(number), device=device)
        frames.put((number, frame))
    frames.put(None)
    taken.acquire()  # the memory is this process's: it must live until the parent is done with it


def main(device: str) -> None:
    spawn = mp.get_context("spawn")
    frames, taken = spawn.Queue(4), spawn.Semaphore(0)
    process = spawn.Process(target=decoder, args=(frames, taken, device))
    process.start()
    while (item := frames.get()) is not None:
        number, frame = item
        print(number, f"{frame.mean().item():g}")
        del frame, item
    taken.release()
    process.join()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cuda" if torch.cuda.is_available() else "cpu")

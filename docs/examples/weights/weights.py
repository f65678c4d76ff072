"""A torch trainer publishes its parameters; two inference workers take each new version between two batches.

    python weights.py [--device cpu] [--steps 20]

Every version carries a checksum of all parameters in its meta, taken inside ``write`` by the trainer. Workers compute
it again inside ``read``, behind a whole batch: a half-written version would not match. The checksums are for the show,
and the only thing here that the host waits for.
"""

import argparse
from multiprocessing import get_context

import torch

import ipcsync
import ipcsync.torch

WORKERS = ("worker-1", "worker-2")


def build() -> torch.nn.Module:
    """Both sides know the model; its parameters go from one to the other."""
    return torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))


def checksum(tensors: dict[str, torch.Tensor]) -> int:
    """Of every bit of them, computed where they are."""
    return sum(int(tensor.view(torch.int32).long().sum()) for tensor in tensors.values())


def trainer(device: str, steps: int) -> None:
    torch.manual_seed(0)
    model = build().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ipcsync.connect(name="trainer", streams="torch") as session:
        weights = ipcsync.torch.share(session, "weights", model)
        events = [session.open_event(name) for name in WORKERS]
        for event in events:
            event.synchronize(round=1)  # it has opened the weights
        for step in range(1, steps + 1):
            batch, wanted = torch.randn(64, 256, device=device), torch.randint(10, (64,), device=device)
            loss = torch.nn.functional.cross_entropy(model(batch), wanted)  # reads the parameters: no turn needed
            optimizer.zero_grad()
            loss.backward()
            with weights.write(meta={"step": step, "last": step == steps}) as version:
                optimizer.step()  # changes them, in place, once no worker reads the version before
                version.meta["checksum"] = checksum(dict(model.named_parameters()))
        for event in events:
            event.synchronize(round=2)  # it has used the last version
    print("trained for", steps, "steps")


def worker(name: str, device: str) -> None:
    model = build().to(device)  # the shape of it; the numbers are the trainer's
    with ipcsync.connect(name=name, streams="torch") as session, torch.no_grad():
        weights, ready = session.open_array("weights"), session.create_event(name, device="cpu")
        ready.record()
        used: list[int] = []
        last = False
        while not last:
            batch = torch.randn(32, 256, device=device)
            with weights.read() as view:  # holds the newest version for one batch, where the trainer keeps it
                parameters = ipcsync.torch.tensors(view)
                scores = torch.func.functional_call(model, parameters, (batch,))
                if "checksum" in view.meta:  # the first version is what the trainer started with
                    assert checksum(parameters) == view.meta["checksum"], f"version {view.version} is torn"
                if not used or view.version > used[-1]:
                    used.append(view.version)
                last = view.meta.get("last", False)
            assert scores.shape == (32, 10)
        ready.record()
    print(name, "used", len(used), "versions, all whole")


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--steps", type=int, default=20)
    given = options.parse_args()
    spawn = get_context("spawn")
    with ipcsync.connect(start_broker=True):  # keeps the broker while the three work
        processes = [spawn.Process(target=trainer, args=(given.device, given.steps))]
        processes += [spawn.Process(target=worker, args=(name, given.device)) for name in WORKERS]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("a process failed")


if __name__ == "__main__":
    main()

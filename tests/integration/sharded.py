"""One of two processes of a module sharded by FSDP2: sharded.py URL RUN STORE CONFIG RANK."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import skerry.torch


def momentum(optimizer: Any) -> float:
    """Return the sum of all that lies here of an optimizer's momentum."""
    held = [state["momentum_buffer"].to_local() for state in optimizer.state.values()]
    return sum(float(part.double().sum()) for part in held)


def evaluate(model: Any) -> Any:
    """Run a pass without gradients, after which FSDP leaves the root's parameters gathered."""
    with torch.no_grad():
        return model(torch.ones(1, 20))


def computes_with_what_it_holds(model: Any) -> bool:
    """Return True if a pass takes the parameters that a checkpoint would."""
    computed, whole = evaluate(model), layers()
    whole.load_state_dict({name: part.full_tensor() for name, part in model.state_dict().items()})
    return torch.equal(computed, evaluate(whole))


def layers() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(20, 15), torch.nn.Linear(15, 1))


def main(url: str, run: str, store: str, config: str, rank: str) -> None:
    distributed.init_process_group("gloo", init_method=store, rank=int(rank), world_size=2)
    torch.manual_seed(int(rank))  # the first process's values count
    model = layers()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.1)
    evaluate(model)
    with skerry.torch.join(
        url, run=run, name="a", model=model, optimizer=optimizer, config=json.loads(config)
    ) as island:
        print(f"begins with {momentum(optimizer)!r}", flush=True)
        for _ in island.batches(range(7)):
            model(torch.zeros(1, 20)).sum().backward()  # gathers and frees, as any loop does
            for parameter in model.parameters():
                parameter.grad = 2 * (parameter.detach() - 1.0)
            optimizer.step()
            evaluate(model)
            island.step(tokens=16, loss=1.0)
        evaluate(model)
    print(f"computes with what it holds: {computes_with_what_it_holds(model)}", flush=True)
    whole = model[0].weight.full_tensor()
    close = int(((whole - 1.0).abs() < 0.1).all(dim=1).sum())
    print(f"ends after {island.cursor} with {close} rows close to the goal", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

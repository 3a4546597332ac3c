"""Puts the faults of a plan into a simulated cluster, and takes them away again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.protocol.subjects import contributor
from skerry_tools.chaos.plan import SHARES, Fault, FaultPlan, Kind, choose
from tests.support.simulation.network import NANOSECONDS, SimulatedNetwork, SimulatedWire

if TYPE_CHECKING:
    from tests.support.simulation.cluster import Cluster


def schedule(cluster: Cluster, plan: FaultPlan) -> None:
    """Have every fault of the plan begin and end at its times."""
    for index, fault in enumerate(plan.faults):
        target = choose(plan, index, cluster.services)
        cluster.network.later(fault.at_s, _begin, cluster, fault, target)
        cluster.network.later(fault.end_s, _end, cluster, fault, target)


def _begin(cluster: Cluster, fault: Fault, target: str) -> None:
    network, wire = cluster.network, cluster.network.wire(target)
    match fault.kind:
        case Kind.KILL:
            cluster.processes[target].down += 1
            network.fired[Kind.KILL] += cluster.kill(target)
        case Kind.PAUSE:
            cluster.loop.freeze(target)
            network.fired[Kind.PAUSE] += 1
        case Kind.PARTITION:
            wire.cuts += 1
            wire.change()
        case Kind.SLOW:
            wire.held_up_s += fault.amount
        case Kind.CLOCK_JUMP:
            wire.clock_ns += int(fault.amount * NANOSECONDS)
            network.fired[Kind.CLOCK_JUMP] += 1
        case Kind.BROKER_KILL:
            _kill_broker(network)
        case Kind.BROKER_PAUSE:
            network.paused += 1
            network.change()
        case Kind.DISK_FULL:
            network.full += 1
        case Kind.WINDOW_DROP:
            _drop(cluster, fault.amount)
        case _:
            wire.shares[fault.kind] = max(wire.shares.get(fault.kind, 0.0), fault.amount)


def _end(cluster: Cluster, fault: Fault, target: str) -> None:
    network, wire = cluster.network, cluster.network.wire(target)
    match fault.kind:
        case Kind.KILL:
            cluster.processes[target].down -= 1
            cluster.start(target)
        case Kind.PAUSE:
            cluster.loop.thaw(target)
        case Kind.PARTITION:
            _mend(network, wire)
        case Kind.SLOW:
            wire.held_up_s = max(0.0, wire.held_up_s - fault.amount)
        case Kind.BROKER_KILL:
            network.down -= 1
            network.change()
        case Kind.BROKER_PAUSE:
            network.paused -= 1
            network.flush()
            network.change()
        case Kind.DISK_FULL:
            network.full -= 1
        case kind if kind in SHARES:
            wire.shares.pop(kind, None)
        case _:
            pass


def _mend(network: SimulatedNetwork, wire: SimulatedWire) -> None:
    wire.cuts -= 1
    network.flush()
    wire.change()


def _kill_broker(network: SimulatedNetwork) -> None:
    """End the broker: what it kept in memory and what lay in its sockets is gone."""
    network.down += 1
    network.delayed.clear()
    network.broker.restart()
    network.fired[Kind.BROKER_KILL] += 1
    network.change()


def _drop(cluster: Cluster, share: float) -> None:
    """Have the window of contributions lose its oldest messages, as a bound that is reached.

    Not before the run has begun: a window that cannot hold genesis is refused when it is created.
    """
    network = cluster.network
    begun = {s.subject for s in network.broker.log if s.subject.endswith(".manifest")}
    if len(begun) < len(cluster.plan.fragments):
        return
    for name, stream in network.broker.streams.items():
        if "_CONTRIB_" not in name:
            continue
        for sequence in list(stream.records)[: int(share * len(stream.records))]:
            network.dropped.add(contributor(stream.records[sequence].subject))
            stream.drop(sequence)
            network.fired[Kind.WINDOW_DROP] += 1

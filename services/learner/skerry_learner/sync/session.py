"""The trainer's side of the log: at each step boundary adopt what is due, answer what is open."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import jax
import numpy as np
import structlog
from numpy.typing import NDArray
from opentelemetry.trace import SpanContext

from skerry.algorithm.fragments import Plan
from skerry.protocol.messages import ContributionHeader, ContributionKind, Round
from skerry.settings.models import SyncConfig
from skerry.telemetry import ids, spans, tracing
from skerry.telemetry.spans import Interval
from skerry_learner.sync import rules
from skerry_learner.sync.lost import Doubt
from skerry_learner.sync.mailbox import Fresh, Mailbox, Outgoing
from skerry_learner.sync.rules import FragmentSync, Policy, Progress

log = structlog.get_logger()


class Fragments(Protocol):
    """What a session does to the parameters; ``Trainer`` is the one implementation."""

    def genesis(self, fragment: int) -> jax.Array: ...
    def capture(self, fragment: int) -> jax.Array: ...
    def release(self, fragment: int) -> None: ...
    def adopt(self, fragment: int, vector: NDArray[np.float32]) -> None: ...
    def reset(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Learner:
    """Who this is, in one run; ``created_ns`` tells the run from others of its id."""

    run: str
    name: str
    incarnation: int
    created_ns: int = 0

    def trace(self, fragment: int, version: int) -> str:
        """Return the id of the trace of the round that makes this version."""
        return ids.trace_id(self.run, fragment, version, self.created_ns)

    def publishing(self, fragment: int, version: int, identity: int) -> SpanContext:
        """Return the span that sends a contribution: the same one at each attempt."""
        trace = self.trace(fragment, version)
        return tracing.context(trace, spans.PUBLISH, self.name, self.incarnation, identity)


class Session:
    """All fragments of one learner. Used by the trainer thread; nothing here waits."""

    def __init__(
        self,
        learner: Learner,
        plan: Plan,
        sync: SyncConfig,
        fragments: Fragments,
        mailbox: Mailbox,
        *,
        start: Progress,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._learner = learner
        self._sync = sync
        self._fragments = fragments
        self._mailbox = mailbox
        self._wall_ns = wall_ns
        self._policy = Policy.of(sync)
        self._states = {f.index: FragmentSync(f.index, start) for f in plan.fragments}
        self.syncs_skipped = 0

    @property
    def versions(self) -> tuple[int, ...]:
        """The adopted version of each fragment; 0 before the first."""
        return tuple(state.version for state in self._states.values())

    @property
    def caught_up(self) -> bool:
        return all(self.versions)

    def staleness(self) -> int:
        """Return how many versions the oldest fragment is behind what the log has announced."""
        newest = dict(enumerate(self.versions))
        for opened in self._mailbox.rounds():
            newest[opened.fragment] = max(newest[opened.fragment], opened.version - 1)
        for fresh in self._mailbox.fresh():
            commit = fresh.manifest.commit
            newest[commit.fragment] = max(newest[commit.fragment], commit.version)
        return max(newest[fragment] - held for fragment, held in enumerate(self.versions))

    def clock(self) -> int:
        """Return the newest step of the global clock that the log has told of."""
        told = [opened.due_step for opened in self._mailbox.rounds()]
        return max([*told, *(state.commit_step for state in self._states.values())])

    def ended(self) -> bool:
        """Tell whether the syncer collects last contributions: training is over."""
        rounds = self._mailbox.rounds()
        return any(r.final and r.version > self._states[r.fragment].version for r in rounds)

    def must_wait(self, now: Progress) -> bool:
        """Tell whether a blocking mode holds this learner at this boundary."""
        return any(rules.must_wait(state, now, self._policy) for state in self._states.values())

    def boundary(self, now: Progress, loss: float, *, idle: bool = False) -> None:
        """Adopt and answer; ``idle`` says that no step will follow for the time being."""
        if lost := self._mailbox.take_diverged():
            self._give_up(lost, now)
        for doubt in self._mailbox.take_lost():
            self._take_back(doubt)
        for fresh in self._mailbox.fresh():
            self._adopt(fresh, now, idle=idle)
        if self.caught_up:
            for opened in self._mailbox.rounds():
                self._answer(opened, now, loss, idle=idle)

    def offer_genesis(self, fragment: int, now: Progress) -> None:
        """Offer the initial parameters of a fragment that the log has no version of."""
        state = rules.captured(self._states[fragment], 1, now)
        self._states[fragment] = replace(state, captured=None)
        header = self._header(state, ContributionKind.GENESIS, now, loss=0.0)
        self._mailbox.post_outgoing(Outgoing(header, self._fragments.genesis(fragment), "f32"))

    def reset(self, now: Progress) -> None:
        """Fall back to the global state; what was learnt since is gone and not contributed."""
        self._fragments.reset()
        for index, state in self._states.items():
            held = replace(now, step=state.captured.step) if state.captured else None
            self._states[index] = replace(state, origin=now, captured=held)

    def _give_up(self, lost: Mapping[int, int], now: Progress) -> None:
        """Begin anew from the global state, free to answer the rounds again that got nothing."""
        log.warning("global_state_readopted", step=now.step, fragments=sorted(lost))
        for fragment, identity in lost.items():
            self._states[fragment] = rules.never_sent(self._states[fragment], identity)
        self.reset(now)

    def _take_back(self, doubt: Doubt) -> None:
        """Have what left the log unmerged go into the next contribution, unless it is too late.

        Once a newer version is adopted the anchor has moved, and that progress is gone.
        """
        state = self._states[doubt.fragment]
        if state.captured is None or state.identity != doubt.identity:
            return
        log.warning("contribution_taken_back", fragment=doubt.fragment, identity=doubt.identity)
        self._fragments.release(doubt.fragment)
        self._states[doubt.fragment] = rules.given_up(state)

    def _adopt(self, fresh: Fresh, now: Progress, *, idle: bool) -> None:
        commit = fresh.manifest.commit
        state = self._states[commit.fragment]
        due, reason = rules.may_adopt(state, commit.version, now, idle=idle, policy=self._policy)
        if not due and reason is not rules.AdoptReason.KNOWN:
            return
        self._mailbox.take_fresh(fresh)
        if not due:
            return
        began_ns = self._wall_ns()
        self._fragments.adopt(commit.fragment, fresh.vector)
        took = Interval(began_ns, self._wall_ns())
        self.syncs_skipped += rules.lapsed(state, commit.version)
        after = rules.adopted(state, commit.version, commit.step, now, self._policy)
        self._states[commit.fragment] = after
        adoption = self._sync.adoption if state.version else "overwrite"
        self._mailbox.telemetry.adopted(self._learner, commit, state.version, adoption, took)

    def _look_for(self, opened: Round) -> None:
        """Ask whether the answer to a round that is opened again is still in the log."""
        state = self._states[opened.fragment]
        if not rules.in_doubt(state, opened) or self._mailbox.sending(opened.fragment):
            return
        self._states[opened.fragment] = replace(state, attempt=opened.attempt)
        self._mailbox.post_doubt(
            Doubt(
                learner=self._learner.name,
                incarnation=self._learner.incarnation,
                fragment=opened.fragment,
                identity=state.identity,
                round_version=opened.version,
            )
        )

    def _answer(self, opened: Round, now: Progress, loss: float, *, idle: bool) -> None:
        state = self._states[opened.fragment]
        if rules.is_old(state, opened):
            return
        self._look_for(opened)
        state = self._states[opened.fragment]
        flying = {s.fragment for s in self._states.values() if s.captured} | self._mailbox.busy()
        yes, reason = rules.may_answer(
            state,
            opened,
            now,
            in_flight=len(flying - {opened.fragment}),
            idle=idle,
            policy=self._policy,
        )
        unsent = yes and self._mailbox.sending(opened.fragment)
        if unsent or reason is rules.AnswerReason.NO_ROOM:
            self._states[opened.fragment] = replace(state, short=opened.version)
        if unsent or not yes:
            return
        state = rules.captured(state, opened.version, now, attempt=opened.attempt)
        self._states[opened.fragment] = state
        began_ns = self._wall_ns()
        gradient = self._fragments.capture(opened.fragment)
        header = self._header(state, ContributionKind.OUTER_GRADIENT, now, loss=loss)
        took = Interval(began_ns, header.captured_ns)
        self._mailbox.telemetry.captured(self._learner, header, took)
        outgoing = Outgoing(header, gradient, self._sync.contribution_scheme)
        self._mailbox.post_outgoing(outgoing)

    def _header(
        self, state: FragmentSync, kind: ContributionKind, now: Progress, *, loss: float
    ) -> ContributionHeader:
        place = self._learner.publishing(state.fragment, state.answered, state.identity)
        steps, tokens = rules.taken(state.origin, now)
        return ContributionHeader(
            kind=kind,
            learner=self._learner.name,
            incarnation=self._learner.incarnation,
            identity=state.identity,
            fragment=state.fragment,
            base_version=state.version,
            round_version=state.answered,
            step=now.step,
            steps=steps,
            tokens=tokens,
            cursor_from=state.origin.cursor,
            cursor_to=now.cursor,
            loss=loss,
            captured_ns=self._wall_ns(),
            trace_parent=tracing.trace_parent(place),
        )

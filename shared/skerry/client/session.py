"""The trainer's side of the log: at each step boundary adopt what is due, answer what is open."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np
import structlog
from numpy.typing import NDArray

from skerry.algorithm.fragments import Plan
from skerry.client.mailbox import Fresh, Gradient, Initial, Mailbox, OutgoingContribution
from skerry.client.telemetry import LearnerTelemetry
from skerry.protocol.commit import tokens_of
from skerry.protocol.learner import (
    AdoptReason,
    AnswerReason,
    LearnerFragment,
    LearnerPolicy,
    MissingCheck,
    TrainingProgress,
    claimed,
)
from skerry.protocol.messages import ContributionHeader, ContributionKind, Pulse, Round
from skerry.settings.models import SyncConfig
from skerry.telemetry import tracing
from skerry.telemetry.spans import Interval

log = structlog.get_logger()

MOST_UNSENT_GENESIS = 2


class Fragments(Protocol):
    """What a session does to the parameters; ``Trainer`` implements it."""

    def genesis(self, fragment: int) -> Gradient: ...
    def capture(self, fragment: int) -> Gradient: ...
    def release(self, fragment: int) -> None: ...
    def adopt(self, fragment: int, vector: NDArray[np.float32]) -> None: ...
    def reset(self) -> None: ...


class Session:
    """All fragments of one learner. Used by the trainer thread; nothing here waits."""

    def __init__(
        self,
        telemetry: LearnerTelemetry,
        plan: Plan,
        sync: SyncConfig,
        fragments: Fragments,
        mailbox: Mailbox,
        *,
        start: TrainingProgress,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.mailbox = mailbox
        self._telemetry = telemetry
        self._sync = sync
        self._fragments = fragments
        self._wall_ns = wall_ns
        self._policy = LearnerPolicy.of(sync)
        self._states = {f.index: LearnerFragment(f.index, start) for f in plan.fragments}
        self._unsent: set[int] = set()
        self._skipped = 0
        self.merged_tokens = 0
        """Tokens of all learners that commits have merged."""
        self.resets = 0

    @property
    def versions(self) -> tuple[int, ...]:
        """The adopted version of each fragment; 0 before the first."""
        return tuple(state.version for state in self._states.values())

    @property
    def caught_up(self) -> bool:
        return all(self.versions)

    def clock(self) -> int:
        """Return the newest step of the global clock in any commit; rounds do not count."""
        fresh = [fresh.manifest.commit.step for fresh in self.mailbox.fresh()]
        return max([*fresh, *(state.commit_step for state in self._states.values())])

    def ended(self) -> bool:
        """Return True once the syncer collects last contributions: training is over."""
        rounds = self.mailbox.rounds
        return any(r.final and r.version > self._states[r.fragment].version for r in rounds)

    def must_wait(self, now: TrainingProgress) -> bool:
        """Return True if a blocking mode holds this learner at this boundary."""
        return any(state.must_wait(now, self._policy) for state in self._states.values())

    def report(self, pulse: Pulse) -> None:
        """Publish how far training is, with the adopted versions.

        ``max_staleness`` is the most versions by which a fragment is behind the newest announced.
        """
        newest = dict(enumerate(self.versions))
        for opened in self.mailbox.rounds:
            newest[opened.fragment] = max(newest[opened.fragment], opened.version - 1)
        for fresh in self.mailbox.fresh():
            commit = fresh.manifest.commit
            newest[commit.fragment] = max(newest[commit.fragment], commit.version)
        behind = max(newest[fragment] - held for fragment, held in enumerate(self.versions))
        pulse = replace(pulse, versions=self.versions, max_staleness=behind)
        self.mailbox.order(replace(pulse, syncs_skipped=self._skipped))

    def boundary(self, now: TrainingProgress, loss: float, *, idle: bool = False) -> None:
        """Adopt and answer; ``idle``: this learner takes no step next, as it has ended or waits."""
        self._take_events(now)
        for fresh in self.mailbox.fresh():
            self.merged_tokens = max(self.merged_tokens, tokens_of([fresh.manifest.commit]))
            self._adopt(fresh, now, idle=idle)
        if self.caught_up:
            for opened in self.mailbox.rounds:
                self._answer(opened, now, loss, idle=idle)

    def offer_genesis(self, fragment: int, now: TrainingProgress) -> bool:
        """Offer the initial parameters of a fragment that the log has no version of.

        Return False if that must wait, because MOST_UNSENT_GENESIS are being sent.
        """
        self._take_events(now)
        if len(self._unsent) >= MOST_UNSENT_GENESIS:
            return False
        state = self._states[fragment].after_capture(1, now)
        self._states[fragment] = replace(state, captured=None)
        self._send(state, ContributionKind.GENESIS, self._fragments.genesis(fragment), now, 0.0)
        return True

    def reset(self, now: TrainingProgress) -> None:
        """Fall back to the global state; local progress since is dropped, not contributed."""
        self.resets += 1
        self._fragments.reset()
        for index, state in self._states.items():
            self._states[index] = state.after_reset(now)

    def _take_events(self, now: TrainingProgress) -> None:
        """Act on what has happened to contributions.

        One that was not finite was never sent: go back to the global state, free to answer the same
        round again. The progress of one that left the log unmerged goes into the next, unless a
        newer version was adopted since: then the anchor has moved, and that progress is lost.
        """
        for event in self.mailbox.take_events():
            if isinstance(event, MissingCheck):
                state = self._states[event.fragment]
                if state.captured is not None and state.identity == event.identity:
                    about = {"fragment": event.fragment, "identity": event.identity}
                    log.warning("contribution_taken_back", **about)
                    self._fragments.release(event.fragment)
                    self._states[event.fragment] = state.after_giving_up()
                continue
            fragment = event.header.fragment
            self._unsent.discard(fragment)
            if not event.sent:
                log.warning("global_state_readopted", step=now.step, fragments=[fragment])
                state = self._states[fragment].after_never_sent(event.header.identity)
                self._states[fragment] = state
                self.reset(now)

    def _adopt(self, fresh: Fresh, now: TrainingProgress, *, idle: bool) -> None:
        commit = fresh.manifest.commit
        state = self._states[commit.fragment]
        due, reason = state.may_adopt(commit.version, now, idle=idle, policy=self._policy)
        if reason is AdoptReason.OVERLAP:
            return
        self.mailbox.take_fresh(fresh)
        if not due:
            return
        if fresh.vector is None:
            initial = Initial(fresh.manifest, self._fragments.genesis(commit.fragment))
            self.mailbox.order(initial)
            return
        began_ns = self._wall_ns()
        self._fragments.adopt(commit.fragment, fresh.vector)
        took = Interval(began_ns, self._wall_ns())
        self._skipped += state.has_lapsed(commit.version)
        after = state.after_adoption(commit.version, commit.step, now, self._policy)
        self._states[commit.fragment] = after
        adoption = self._sync.adoption if state.version else "overwrite"
        self._telemetry.adopted(commit, state.version, adoption, took)

    def _answer(self, opened: Round, now: TrainingProgress, loss: float, *, idle: bool) -> None:
        fragment, state = opened.fragment, self._states[opened.fragment]
        if state.has_answered(opened):
            return
        unsent = fragment in self._unsent
        if state.may_be_missing(opened) and not unsent:
            state = self._states[fragment] = replace(state, attempt=opened.attempt)
            learner = self._telemetry.identity
            self.mailbox.order(
                MissingCheck(
                    learner.name, learner.incarnation, fragment, state.identity, opened.version
                )
            )
        flying = {s.fragment for s in self._states.values() if s.captured} | self._unsent
        flying |= {fresh.fragment for fresh in self.mailbox.fresh()}
        in_flight = len(flying - {fragment})
        answers, reason = state.may_answer(
            opened, now, in_flight=in_flight, idle=idle, policy=self._policy
        )
        if reason is AnswerReason.NO_ROOM or (answers and unsent):
            self._states[fragment] = replace(state, short=opened.version)
        elif answers:
            state = state.after_capture(opened.version, now, attempt=opened.attempt)
            self._states[fragment] = state
            began_ns = self._wall_ns()
            gradient = self._fragments.capture(fragment)
            header = self._send(state, ContributionKind.OUTER_GRADIENT, gradient, now, loss)
            self._telemetry.captured(header, Interval(began_ns, header.captured_ns))

    def _send(
        self,
        state: LearnerFragment,
        kind: ContributionKind,
        gradient: Gradient,
        now: TrainingProgress,
        loss: float,
    ) -> ContributionHeader:
        learner = self._telemetry.identity
        place = learner.publishing(state.fragment, state.answered, state.identity)
        steps, tokens = claimed(state.origin, now)
        header = ContributionHeader(
            kind=kind,
            learner=learner.name,
            incarnation=learner.incarnation,
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
        genesis = kind is ContributionKind.GENESIS
        scheme = "f32" if genesis else self._sync.contribution_scheme
        routed = ({}, {}) if genesis else (state.origin.routed, now.routed)
        self._unsent.add(state.fragment)
        self.mailbox.order(OutgoingContribution(header, gradient, scheme, routed))
        return header

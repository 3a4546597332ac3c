"""The trainer's side of the log: at each step boundary adopt what is due, answer what is open."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np
import structlog
from numpy.typing import NDArray

from skerry.algorithm.fragments import Plan
from skerry.protocol.learner import (
    AdoptReason,
    AnswerReason,
    LearnerFragment,
    LearnerPolicy,
    MissingCheck,
    TrainingProgress,
    claimed,
)
from skerry.protocol.messages import ContributionHeader, ContributionKind, Round
from skerry.settings.models import SyncConfig
from skerry.telemetry import tracing
from skerry.telemetry.spans import Interval
from skerry_learner.sync.mailbox import Fresh, Gradient, Mailbox, OutgoingContribution
from skerry_learner.sync.telemetry import LearnerTelemetry

log = structlog.get_logger()


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
        self._telemetry = telemetry
        self._sync = sync
        self._fragments = fragments
        self._mailbox = mailbox
        self._wall_ns = wall_ns
        self._policy = LearnerPolicy.of(sync)
        self._states = {f.index: LearnerFragment(f.index, start) for f in plan.fragments}
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
        """Return the newest step of the global clock that a commit bears out.

        What a round says does not count: it is only a question.
        """
        fresh = [fresh.manifest.commit.step for fresh in self._mailbox.fresh()]
        return max([*fresh, *(state.commit_step for state in self._states.values())])

    def ended(self) -> bool:
        """Return True once the syncer collects last contributions: training is over."""
        rounds = self._mailbox.rounds()
        return any(r.final and r.version > self._states[r.fragment].version for r in rounds)

    def must_wait(self, now: TrainingProgress) -> bool:
        """Return True if a blocking mode holds this learner at this boundary."""
        return any(state.must_wait(now, self._policy) for state in self._states.values())

    def boundary(self, now: TrainingProgress, loss: float, *, idle: bool = False) -> None:
        """Adopt and answer; ``idle`` says that no step will follow for the time being."""
        if lost := self._mailbox.take_diverged():
            self._give_up(lost, now)
        for check in self._mailbox.take_lost():
            self._take_back(check)
        for fresh in self._mailbox.fresh():
            self._adopt(fresh, now, idle=idle)
        if self.caught_up:
            for opened in self._mailbox.rounds():
                self._answer(opened, now, loss, idle=idle)

    def offer_genesis(self, fragment: int, now: TrainingProgress) -> None:
        """Offer the initial parameters of a fragment that the log has no version of."""
        state = self._states[fragment].after_capture(1, now)
        self._states[fragment] = replace(state, captured=None)
        header = self._header(state, ContributionKind.GENESIS, now, loss=0.0)
        self._mailbox.post_outgoing(
            OutgoingContribution(header, self._fragments.genesis(fragment), "f32")
        )

    def reset(self, now: TrainingProgress) -> None:
        """Fall back to the global state; what was learnt since is gone and not contributed."""
        self._fragments.reset()
        for index, state in self._states.items():
            self._states[index] = state.after_reset(now)

    def _give_up(self, lost: Mapping[int, int], now: TrainingProgress) -> None:
        """Start from the global state again, free to answer the rounds that got nothing."""
        log.warning("global_state_readopted", step=now.step, fragments=sorted(lost))
        for fragment, identity in lost.items():
            self._states[fragment] = self._states[fragment].after_never_sent(identity)
        self.reset(now)

    def _take_back(self, check: MissingCheck) -> None:
        """Have what left the log unmerged go into the next contribution, unless it is too late.

        Once a newer version is adopted the anchor has moved, and that progress is gone.
        """
        state = self._states[check.fragment]
        if state.captured is None or state.identity != check.identity:
            return
        log.warning("contribution_taken_back", fragment=check.fragment, identity=check.identity)
        self._fragments.release(check.fragment)
        self._states[check.fragment] = state.after_giving_up()

    def _adopt(self, fresh: Fresh, now: TrainingProgress, *, idle: bool) -> None:
        commit = fresh.manifest.commit
        state = self._states[commit.fragment]
        due, reason = state.may_adopt(commit.version, now, idle=idle, policy=self._policy)
        if reason is AdoptReason.OVERLAP:
            return
        self._mailbox.take_fresh(fresh)
        if not due:
            return
        began_ns = self._wall_ns()
        self._fragments.adopt(commit.fragment, fresh.vector)
        took = Interval(began_ns, self._wall_ns())
        self.syncs_skipped += state.has_lapsed(commit.version)
        after = state.after_adoption(commit.version, commit.step, now, self._policy)
        self._states[commit.fragment] = after
        adoption = self._sync.adoption if state.version else "overwrite"
        self._telemetry.adopted(commit, state.version, adoption, took)

    def _answer(self, opened: Round, now: TrainingProgress, loss: float, *, idle: bool) -> None:
        state = self._states[opened.fragment]
        if state.has_answered(opened):
            return
        sending = self._mailbox.sending(opened.fragment)
        if state.may_be_missing(opened) and not sending:
            state = self._look_for(state, opened)
        flying = {s.fragment for s in self._states.values() if s.captured} | self._mailbox.busy()
        in_flight = len(flying - {opened.fragment})
        answers, reason = state.may_answer(
            opened, now, in_flight=in_flight, idle=idle, policy=self._policy
        )
        unsent = answers and sending
        if unsent or reason is AnswerReason.NO_ROOM:
            self._states[opened.fragment] = replace(state, short=opened.version)
        elif answers:
            self._capture(
                state.after_capture(opened.version, now, attempt=opened.attempt), now, loss
            )

    def _look_for(self, state: LearnerFragment, opened: Round) -> LearnerFragment:
        """Ask whether the answer to a round that is opened again is still in the log."""
        learner = self._telemetry.identity
        state = self._states[opened.fragment] = replace(state, attempt=opened.attempt)
        check = MissingCheck(
            learner=learner.name,
            incarnation=learner.incarnation,
            fragment=opened.fragment,
            identity=state.identity,
            round_version=opened.version,
        )
        self._mailbox.post_check(check)
        return state

    def _capture(self, state: LearnerFragment, now: TrainingProgress, loss: float) -> None:
        self._states[state.fragment] = state
        began_ns = self._wall_ns()
        gradient = self._fragments.capture(state.fragment)
        header = self._header(state, ContributionKind.OUTER_GRADIENT, now, loss=loss)
        self._telemetry.captured(header, Interval(began_ns, header.captured_ns))
        self._mailbox.post_outgoing(
            OutgoingContribution(header, gradient, self._sync.contribution_scheme)
        )

    def _header(
        self, state: LearnerFragment, kind: ContributionKind, now: TrainingProgress, *, loss: float
    ) -> ContributionHeader:
        learner = self._telemetry.identity
        place = learner.publishing(state.fragment, state.answered, state.identity)
        steps, tokens = claimed(state.origin, now)
        return ContributionHeader(
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

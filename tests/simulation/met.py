"""What a life has met, so that tests can tell that nothing they are about was left out.

Station: `Deeds` and `Checks` count here. `STATES` are all states that a request can be aborted in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Final

from kvmanager_service.core.block import KVCacheBlock
from kvmanager_service.core.request import Request, RequestStatus
from kvmanager_service.core.scheduler import Scheduler
from kvmanager_service.core.step import CopyDirection
from kvmanager_service.core.swap_space import CopyPhase
from tests.simulation.stories import Story


@dataclass
class Counts:
    """What happened in a life.

    Attributes:
        faults: by kind, those that came to something.
        finished: by reason, requests that ended.
        refused: why requests were not accepted.
        outcomes: what came of faults that can end in several ways.
        aborted_in: by state, requests that were aborted in it.
    """

    faults: dict[str, int] = field(default_factory=dict)
    finished: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)
    aborted_in: dict[str, int] = field(default_factory=dict)

    def add_all(self, other: Counts) -> None:
        """What another life has met as well."""
        for one in fields(self):
            counter = getattr(self, one.name)
            for name, times in getattr(other, one.name).items():
                counter[name] = counter.get(name, 0) + times

    @staticmethod
    def add(counter: dict[str, int], name: str) -> None:
        """One more of something."""
        counter[name] = counter.get(name, 0) + 1


State = Callable[[Scheduler, Request, Story], bool]


def _is_running(scheduler: Scheduler, request: Request, story: Story) -> bool:
    return request.status is RequestStatus.RUNNING


def _is_new(request: Request) -> bool:
    return request.status is RequestStatus.WAITING and request.leader is None and not request.num_output_tokens


def _is_preempted(request: Request) -> bool:
    return request.status is RequestStatus.PREEMPTED


def _has_row(scheduler: Scheduler, request: Request, *, of_this_life: bool = True) -> bool:
    """Whether a step that is out has a row of it, scheduled in its present life or in one before."""
    return any(
        row.request is request and (row.incarnation == request.incarnation) is of_this_life
        for step in scheduler.outstanding
        for row in step.rows
    )


def _copy_phase(scheduler: Scheduler, request: Request) -> CopyPhase | None:
    swap_space = scheduler.swap_space
    copy = None if swap_space is None else swap_space._copies.get(request.arrival_seq)
    return None if copy is None else copy.phase


def _blocks(request: Request) -> list[KVCacheBlock]:
    return request.blocks + [block for table in request.tables for block in table.blocks[table.first :]]


def _awaits_copies(scheduler: Scheduler, request: Request, direction: CopyDirection) -> bool:
    """Whether steps that are out copy to its blocks."""
    held = {block.block_id for block in _blocks(request)}
    return any(
        copy.direction is direction and copy.target_id in held for step in scheduler.outstanding for copy in step.copies
    )


def _holds_pinned(scheduler: Scheduler, request: Request, story: Story) -> bool:
    pinned = {block.block_id for pin in scheduler.pins for block in pin.blocks}
    return any(block.block_id in pinned for block in _blocks(request))


def _is_sampled_for(scheduler: Scheduler, request: Request, story: Story) -> bool:
    return any(branch.request is request for step in scheduler.outstanding for branch in step.branches)


def _has_a_place_and_no_blocks(scheduler: Scheduler, request: Request, story: Story) -> bool:
    """It runs and has no row, though something is to be computed: it awaits blocks on their way to the host."""
    return (
        _is_running(scheduler, request, story)
        and bool(scheduler.outstanding)
        and not _has_row(scheduler, request)
        and request.num_schedulable_tokens > 0
        and scheduler.swap_space is not None
        and scheduler.swap_space.has_leaving
    )


STATES: Final[Mapping[str, State]] = {
    # Before it runs.
    "waiting": lambda scheduler, request, story: _is_new(request),
    "waiting, with output of an earlier stream": lambda scheduler, request, story: (
        request.status is RequestStatus.WAITING and request.num_output_tokens > 0
    ),
    "waiting fork that holds blocks": lambda scheduler, request, story: (
        request.status is RequestStatus.WAITING and bool(_blocks(request))
    ),
    "waiting, with followers": lambda scheduler, request, story: _is_new(request) and bool(request.followers),
    "follower of one that waits": lambda scheduler, request, story: (
        request.leader is not None and request.leader.status is not RequestStatus.RUNNING
    ),
    "follower of one that runs": lambda scheduler, request, story: (
        request.leader is not None and request.leader.status is RequestStatus.RUNNING
    ),
    # Running.
    "prefilling, between two chunks": lambda scheduler, request, story: (
        _is_running(scheduler, request, story)
        and not _has_row(scheduler, request)
        and 0 < request.num_computed_tokens < request.num_prompt_tokens
    ),
    "prefilling, a chunk in flight": lambda scheduler, request, story: (
        _is_running(scheduler, request, story) and _has_row(scheduler, request) and not request.num_pending_tokens
    ),
    "its first token being sampled": lambda scheduler, request, story: (
        request.num_pending_tokens > 0 and not request.num_output_tokens
    ),
    "decoding, no row in flight": lambda scheduler, request, story: (
        _is_running(scheduler, request, story) and request.num_output_tokens > 0 and not _has_row(scheduler, request)
    ),
    "decoding, a token being sampled": lambda scheduler, request, story: (
        request.num_pending_tokens == 1 and request.num_output_tokens > 0
    ),
    "decoding, a row fed by a sample in flight": lambda scheduler, request, story: request.num_pending_tokens == 2,
    "running, with followers": lambda scheduler, request, story: (
        _is_running(scheduler, request, story) and bool(request.followers)
    ),
    "branch, sampled for by its leader's row": _is_sampled_for,
    "branch, of its own": lambda scheduler, request, story: (
        _is_running(scheduler, request, story) and bool(request.family_id) and _has_row(scheduler, request)
    ),
    "fork of one that ran": lambda scheduler, request, story: (
        _is_running(scheduler, request, story) and bool(story.new.fork_of)
    ),
    "next to write to a block that another has": lambda scheduler, request, story: request.may_share_tail,
    "its copy of a shared block in flight": lambda scheduler, request, story: _awaits_copies(
        scheduler, request, CopyDirection.DEVICE_TO_DEVICE
    ),
    "pinned prefix in use": _holds_pinned,
    "running with an adapter": lambda scheduler, request, story: (
        _is_running(scheduler, request, story) and request.lora is not None
    ),
    "awaiting blocks that leave for the host": _has_a_place_and_no_blocks,
    # Preempted.
    "preempted": lambda scheduler, request, story: _is_preempted(request) and _copy_phase(scheduler, request) is None,
    "preempted, a row of its former life in flight": lambda scheduler, request, story: (
        _is_preempted(request) and _has_row(scheduler, request, of_this_life=False)
    ),
    "preempted branch": lambda scheduler, request, story: _is_preempted(request) and bool(request.family_id),
    "running again, a row of its former life in flight": lambda scheduler, request, story: (
        _is_running(scheduler, request, story) and _has_row(scheduler, request, of_this_life=False)
    ),
    "swapping out": lambda scheduler, request, story: _copy_phase(scheduler, request) is CopyPhase.LEAVING,
    "swapping out, its next token being sampled": lambda scheduler, request, story: (
        _copy_phase(scheduler, request) is CopyPhase.LEAVING and request.num_pending_tokens > 0
    ),
    "on the host": lambda scheduler, request, story: _copy_phase(scheduler, request) is CopyPhase.HELD,
    "swapping in": lambda scheduler, request, story: _copy_phase(scheduler, request) is CopyPhase.RETURNING,
    "computing again after a preemption": lambda scheduler, request, story: (
        _is_running(scheduler, request, story) and request.num_preemptions > 0
    ),
    # Something is wrong with it, or may be.
    "blamed for a lost step": lambda scheduler, request, story: request.failed_steps == 1,
    "suspect, to compute alone": lambda scheduler, request, story: request.failed_steps > 1,
    "its row failed, and nobody knows yet": lambda scheduler, request, story: (
        story.row_failures > 0 and _has_row(scheduler, request)
    ),
}
"""By name, whether a request is in that state; it can be in several. Its story is what the simulation knows of it."""

SELDOM: Final = frozenset(
    {
        "awaiting blocks that leave for the host",
        "branch, sampled for by its leader's row",
        "fork of one that ran",
        "its copy of a shared block in flight",
        "its row failed, and nobody knows yet",
        "pinned prefix in use",
        "preempted, a row of its former life in flight",
        "running again, a row of its former life in flight",
        "running, with followers",
        "suspect, to compute alone",
        "swapping in",
        "swapping out",
        "swapping out, its next token being sampled",
    }
)
"""States that requests are in for a step or two, if at all: an abort meets them if it is meant to."""


def states_of(scheduler: Scheduler, request: Request, story: Story) -> list[str]:
    """The states that a request is in."""
    return [name for name, is_in in STATES.items() if is_in(scheduler, request, story)]

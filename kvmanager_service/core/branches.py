"""Requests that go on from another's tokens: branches of one request, and forks at any time.

Station: asked by `Scheduler`. It works on what the scheduler owns, and keeps nothing of its own.

A request with branches runs as one sequence, its leader, until the row that samples its first token samples once for
each: there the others, its followers, are forked from it. They wait in no queue; places to run are kept for them. From
there on each is a request like any other. Branches that go on from an earlier stream are so from the beginning: what
they share is found in the prefix cache, as it is for preempted ones.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvmanager_service.core.errors import InvalidRequestError
from kvmanager_service.core.forks import require_common
from kvmanager_service.core.kv_cache import KVCache
from kvmanager_service.core.request import Request, RequestStatus
from kvmanager_service.core.request_book import RequestBook
from kvmanager_service.core.step import ScheduledRow, Step
from kvmanager_service.core.step_plan import StepPlan


def is_current(request: Request, incarnation: int) -> bool:
    """Whether a request still lives the life in which it was scheduled."""
    return request.status is RequestStatus.RUNNING and request.incarnation == incarnation


def takes_samples(request: Request, incarnation: int) -> bool:
    """Whether what is sampled for a life of a request is the request's: it lives it still, or awaits its samples."""
    return is_current(request, incarnation) or request.awaited_incarnation == incarnation


def fork_followers(plan: StepPlan, kv: KVCache, book: RequestBook) -> None:
    """The rows that sample their request's first token do so for its followers, too: these run from here."""
    for index, row in enumerate(plan.rows):
        leader = row.request
        if not leader.followers or not plan.samples(row):
            continue
        for follower in list(leader.followers):
            kv.fork(leader, follower, row.stop)
            book.fork(follower)
            plan.branch(index, follower)
            book.admitted(follower)


def require_fork(parent: Request, request: Request) -> None:
    """Raise InvalidRequestError unless a new request begins as its parent does, but for the last token of the shorter.

    So must what else decides their K/V. Whether anything can be shared now is of no concern.
    """
    try:
        require_common(parent, request, min(parent.num_tokens, request.num_tokens) - 1)
    except ValueError as error:
        raise InvalidRequestError("NOT_A_FORK", f"fork_of: {error}", field="fork_of") from error


def fork(kv: KVCache, parent: Request, request: Request, outstanding: Iterable[Step]) -> bool:
    """Let a request that begins as its parent does hold the blocks of what is computed of that, and acknowledged.

    Of a follower that is its leader's: until it is forked they are one. Where the parent's states have left that, it is
    what is computed of the last checkpoint before.

    Returns:
        False when nothing is, or when the parent's windows or states have left it; then nothing has changed.
    """
    if parent.leader is not None:
        parent = parent.leader
    num_tokens = min(num_acknowledged(parent, outstanding), parent.num_tokens, request.num_tokens - 1)
    for num_shared in (num_tokens, num_tokens // kv.block_size * kv.block_size):
        if num_shared <= 0:
            break
        try:
            kv.fork(parent, request, num_shared)
        except ValueError:
            continue
        return True
    return False


def num_acknowledged(request: Request, outstanding: Iterable[Step]) -> int:
    """How many of a request's tokens are known to be computed."""
    for step in outstanding:
        for row in step.rows:
            if row.request is request and row.incarnation == request.incarnation:
                return row.start
        for branch in step.branches:
            if branch.request is request and branch.incarnation == request.incarnation:
                return branch.row.start
    return request.num_computed_tokens


def sampled_for(row: ScheduledRow) -> list[Request]:
    """The requests that a row computed for and that still live that life: its own and those it was to sample for."""
    requests = [row.request] if is_current(row.request, row.incarnation) else []
    return requests + [one.request for one in row.branches or () if is_current(one.request, one.incarnation)]


def forked_from(row: ScheduledRow, later: Iterable[Step]) -> list[Request]:
    """Branches that later rows of the same life have made: they read what this row wrote, full block or not."""
    return [
        branch.request
        for step in later
        for branch in step.branches
        if branch.row.request is row.request
        and branch.row.incarnation == row.incarnation
        and is_current(branch.request, branch.incarnation)
    ]


def twins(request: Request, book: RequestBook) -> list[Request]:
    """A request, and its branches that have come exactly as far: what breaks one of them breaks all.

    Followers are not among them: they end with their leader.
    """
    family = book.families.get(request.family_id)
    return [
        member
        for member in ([request] if family is None else family.members.values())
        if member.leader is None and (member is request or member.token_bytes == request.token_bytes)
    ]

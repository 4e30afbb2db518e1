"""Naming the rank that is to blame when a transfer does not come to its end.

gloo says that a connection closed or that time is up, not whose. So a rank that gives up leaves a note in the store of
the group, ranks that wait look for notes, and who leaves none is missing. Nothing is asked of the store while transfers
take less than a second.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from pyg_fullgraph.errors import RankError

__all__ = ["Watched", "give_up"]

#: How often a rank that waits for a transfer looks for notes, and how long it waits for those of the others.
POLL_S, ANSWER_S = 1.0, 5.0
_KEY, _LOST = "pyg_fullgraph/gave_up/", "lost contact"


class Watched:
    """The work of a transfer on CPUs; waiting for it ends when a rank gives up, with an error that names it."""

    def __init__(self, work: Any, process_group: Any) -> None:
        self._work, self._group = work, process_group

    def wait(self) -> None:
        """Raises: RankError."""
        while True:
            try:
                self._work.wait(timedelta(seconds=POLL_S))
                return
            except RuntimeError as error:
                if self._work.is_completed():
                    self._finish()
                    return
                if _has_notes(self._group):
                    raise _blame(self._group, error) from None

    def _finish(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise _blame(self._group, error) from error


def give_up(process_group: Any, reason: str) -> None:
    """Tell the other ranks that this one takes part no longer; the first reason counts."""
    try:
        store = process_group.get_group_store()
        if not store.check([_KEY + str(process_group.rank())]):
            store.set(_KEY + str(process_group.rank()), reason)
    except RuntimeError:
        pass  # the store went with the process that kept it, and so nobody reads notes


def _notes(process_group: Any) -> dict[int, str]:
    """What ranks that gave up left, but for this one."""
    store, found = process_group.get_group_store(), {}
    for rank in range(process_group.size()):
        if rank != process_group.rank() and store.check([_KEY + str(rank)]):
            found[rank] = store.get(_KEY + str(rank)).decode()
    return found


def _has_notes(process_group: Any) -> bool:
    try:
        return bool(_notes(process_group))
    except RuntimeError:  # no store, no group
        return True


def _blame(process_group: Any, error: Exception) -> RankError:
    """Who failed; or who does not say anything, once all others had the time to answer."""
    give_up(process_group, _LOST)
    others = [k for k in range(process_group.size()) if k != process_group.rank()]
    until = time.monotonic() + ANSWER_S
    try:
        while True:
            notes = _notes(process_group)
            failed = {k: note for k, note in notes.items() if note != _LOST}
            if failed or len(notes) == len(others) or time.monotonic() > until:
                break
            time.sleep(0.05)
    except RuntimeError:
        return RankError({}, [], f"no store of the group: the launcher or rank 0, who keeps it, ended; {error}")
    return RankError(failed, [] if failed else [k for k in others if k not in notes], str(error))

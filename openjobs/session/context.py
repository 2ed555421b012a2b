"""What a turn sees: the messages of its branch, and the ended jobs that hang beside them.

Source: spec 003, D8. A running job is never seen, so no turn meets half-written content; a completed
one stands with its result (or its whole branch), a cancelled one with its partial text and marker,
an errored one with its error line. A card is written whole, in one commit, so what is seen of a job is
all of it or nothing; the card of a job in another session follows that session's commits, so what it
points to is there.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator

import attrs

from ..errors import InvalidInput, OpenJobsError
from ..ids import short
from .branch import cards_beside, chain
from .documents import Documents
from .history import ATTACH, NOTICE, Node

#: another session's documents; raises what reading them does
OpenSession = Callable[[str], Documents]


class ItemKind(enum.StrEnum):
    MESSAGE = "message"
    ATTACH = "attach"  #: an ended job
    NOTICE = "notice"  #: a message that says what has ended
    CUT = "cut"  #: older items were left out for the budget


@attrs.frozen(kw_only=True, slots=True)
class ContextItem:
    kind: ItemKind
    role: str
    text: str
    #: the message or card; None for `CUT`
    node: Node | None = None
    #: of an ended job: its id, label and how it ended
    job_id: str | None = None
    label: str | None = None
    status: str | None = None


def context_of(
    documents: Documents,
    head_id: str,
    *,
    budget: int | None = None,
    expand_branches: bool = False,
    open_session: OpenSession | None = None,
) -> list[ContextItem]:
    """The ordered items that a turn at `head_id` sees, oldest first.

    `budget` is a number of characters, as `chat_messages` counts them: the newest items that fit are kept,
    whole, and the last one always; what was left out is said by a first item of kind `CUT`.
    `expand_branches` puts the messages of a completed job's branch in place of its result, those of a job
    in another session by `open_session`; a branch that cannot be read is said, with the result.

    Raises `UnknownNode`, `Damaged`, and `InvalidInput` for a budget that is none.
    """
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 0):
        raise InvalidInput(f"a budget is a number of characters, 0 or more, not {budget!r}")
    nodes = list(reversed(list(chain(documents, head_id))))
    chained = {node.id for node in nodes}
    beside = cards_beside(documents, chained)
    items = [
        item
        for node in nodes
        for each in (node, *(card for card in beside.get(node.id, ()) if not _is_on(card, chained)))
        for item in _items(documents, each, expand_branches, open_session)
    ]
    return items if budget is None else _within(items, budget)


def _is_on(card: Node, chained: set[str]) -> bool:
    """Whether the job that a card stands for ended on this very branch, so that its messages are seen anyway: a
    foreground turn of the conversation, or a branch that was checked out."""
    return card.extra.get("attach", {}).get("head_id") in chained


def _items(
    documents: Documents, node: Node, expand_branches: bool, open_session: OpenSession | None
) -> Iterator[ContextItem]:
    if node.function != ATTACH:
        kind = ItemKind.NOTICE if node.function == NOTICE else ItemKind.MESSAGE
        yield ContextItem(kind=kind, role=node.role, text=node.content, node=node)
        return
    attach = node.extra.get("attach", {})
    status = attach.get("status")
    if status not in ("completed", "cancelled", "errored"):
        return
    about = {"job_id": attach.get("job_id"), "label": node.extra.get("label"), "status": status}
    head_id = attach.get("head_id")
    text = node.content
    if expand_branches and status == "completed" and head_id is not None:
        session_id = str(attach.get("session_id"))
        own = session_id == documents.meta().session_id
        try:
            if own or open_session is not None:
                target = documents if own or open_session is None else open_session(session_id)
                branch = _job_branch(target, head_id, str(attach.get("job_id")))
                for each in branch:
                    yield ContextItem(kind=ItemKind.ATTACH, role=each.role, text=each.content, node=each, **about)
                return
        except (OpenJobsError, OSError) as error:
            if own:
                raise
            text = f"[its branch in session {session_id} cannot be read ({type(error).__name__}); its result:]\n{text}"
    yield ContextItem(kind=ItemKind.ATTACH, role="user", text=text, node=node, **about)


def _job_branch(documents: Documents, head_id: str, job_id: str) -> list[Node]:
    """The messages of a job's own branch: from its prompt to its head."""
    found: list[Node] = []
    for node in chain(documents, head_id):
        found.append(node)
        if node.role == "user" and node.extra.get("job_id") == job_id:
            break
    return found[::-1]


def _within(items: list[ContextItem], budget: int) -> list[ContextItem]:
    kept: list[ContextItem] = []
    used = 0
    for item in reversed(items):
        used += len(_chat_text(item))
        if kept and used > budget:
            break
        kept.append(item)
    left_out = len(items) - len(kept)
    if left_out:
        kept.append(ContextItem(kind=ItemKind.CUT, role="system", text=f"[{left_out} earlier messages left out]"))
    return kept[::-1]


def chat_messages(items: list[ContextItem]) -> list[dict[str, str]]:
    """Plain chat messages for a provider: `{"role", "content"}`, an ended job as a user message that says so."""
    return [{"role": item.role, "content": _chat_text(item)} for item in items]


def _chat_text(item: ContextItem) -> str:
    if item.kind is not ItemKind.ATTACH or (item.node is not None and item.node.function != ATTACH):
        return item.text
    label = f' "{item.label}"' if item.label else ""
    return f"[background job {short(item.job_id or '?')}{label} {item.status}]\n{item.text}"

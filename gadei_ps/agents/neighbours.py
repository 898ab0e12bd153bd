"""A machine's part in the exchange with neighbouring groups: what it gives, gets and takes.

The driver asks for each round which models it takes; groups/choice.py says who decides that. All
methods but `made` and `learn` are for the driver's thread.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gadei_ps.agents.broadcast import Broadcast
from gadei_ps.agents.constants import checksum
from gadei_ps.agents.inbox import Addresses, Goal, Inbox
from gadei_ps.agents.letters import Book
from gadei_ps.agents.listener import Listener
from gadei_ps.agents.plan import Floats
from gadei_ps.agents.post import Post
from gadei_ps.agents.state import State
from gadei_ps.groups.choice import Choosing, newest
from gadei_ps.groups.membership import Member, View
from gadei_ps.groups.messages import Aim, Choice, Message, Model, Offer, Reply

ROUNDS = 1 << 32
"""A group that has begun in a certain second has versions from so many times that second on."""


@dataclass(frozen=True)
class Group:
    """Which group a machine belongs to.

    sources: the groups whose models it takes; of each the numbers and addresses of some machines.
    """

    number: int = 0
    sources: Mapping[int, Addresses] = field(default_factory=dict)

    def __str__(self) -> str:
        """What all its machines must have alike."""
        models = ", ".join(map(str, sorted(self.sources))) or "-"
        return f"group {self.number}, models of groups {models}"


@dataclass(frozen=True)
class Taken:
    """What a round takes, from the oldest to the newest; it stays until `held` is closed."""

    models: Sequence[Model]
    weights: Sequence[Floats]
    held: contextlib.ExitStack


class Neighbours:
    """The part of one life."""

    def __init__(
        self,
        door: Listener,
        me: Member,
        group: Group,
        state: State,
        post: Post,
        came: Callable[[Model], None],
        *,
        piece_s: float = 5.0,
    ) -> None:
        """came: is called in another thread when a model has come; then `look` is due."""
        self._me, self._group, self._state, self._post = me, group, state, post
        number = int(me.machine)
        self._choosing = Choosing(me, takes_all=state.rule.takes_all)
        self._said: Aim | Offer | None = None
        self._inbox = Inbox(
            *(door, number, group.sources, state.values, came),
            group=group.number,
            book=lambda: post.book,
            constants=self._constants,
            piece_s=piece_s,
        )
        self._broadcast = Broadcast(
            *(door, number, group.number, state.values, state.wire),
            *(lambda: post.book, self._inbox.weights, self._inbox.learn),
            constants=self._constants,
            piece_s=piece_s,
        )

    def close(self) -> None:
        """Ends all threads and connections."""
        self._inbox.close()
        self._broadcast.close()

    def learn(self, group: int, book: Book) -> None:
        """Where machines of another group can be reached now. For any thread."""
        self._inbox.learn(group, book)

    # -- what it gives ----------------------------------------------------------------------------

    def made(self) -> None:
        """The state has advanced by a round. For the thread that does so."""
        told = self._state.told
        if told is not None:
            self._broadcast.stage(self._version(self._state.rounds), told)

    def applied(self, rounds: int) -> None:
        """All members hold the state after this many rounds."""
        self._broadcast.publish(self._version(rounds))

    # -- what it takes ----------------------------------------------------------------------------

    def offer(self, view: View, number: int) -> None:
        """This machine has its share of round `number`: what has come by now may be in it."""
        if not self._decides(number) or self._choosing.enter(view).has_offered(number):
            return
        if not number:
            self._choosing.offer(0, [Model(self._group.number, int(time.time()) * ROUNDS)])
            self._repeat_offer(view)
            self._choose(view, 0)
            return
        fresh = self._fresh()
        self._pin(view, fresh)
        still = self._inbox.held()  # one may have gone before it was pinned
        self._choosing.offer(number, [one for one in fresh if one in still])
        self._repeat_offer(view)
        self._choose(view, number)

    def take(self, view: View, number: int) -> Taken | None:
        """What the round takes, the same on all machines; None: not known yet."""
        models = self._choosing.enter(view).chosen(number) if self._decides(number) else ()
        if models is None:
            return None
        with contextlib.ExitStack() as stack:
            arrays = models if number else ()
            found = [stack.enter_context(self._inbox.weights(one)) for one in arrays]
            weights = [one for one in found if one is not None]
            if len(weights) < len(found):
                return None
            return Taken(models, weights, stack.pop_all())

    def hear(self, view: View, sender: Member, body: Reply) -> None:
        """A message under the present view."""
        if sender not in view.members:
            return
        answer = self._choosing.enter(view).hear(sender, view, body)
        if answer is not None:
            self._send(view, [sender], answer)
        if isinstance(body, Offer) and body.round is not None:
            self._choose(view, body.round)
        self.look(view)

    def look(self, view: View, *, again: bool = False) -> None:
        """Seeks what is to be got next. again: and repeats what is due, for letters may be lost."""
        self._choosing.enter(view)
        if again:
            self._repeat_offer(view)
        if not self._group.sources:
            return
        held = self._fresh()
        said: Aim | Offer = Offer(tuple(held))
        to: Iterable[Member] = [view.first]
        if self._me == view.first:
            said, to = self._choosing.aim(view, held), view.members
        if again or said != self._said:
            self._said = said
            self._send(view, to, said)
        self._pin(view)
        self._inbox.seek(self._goals(view, held))

    def _goals(self, view: View, held: Sequence[Model]) -> dict[int, Goal]:
        """The first member gets the newest models, the others those that it names.

        Without a state none is of use, and nobody knows which buffers are constants here.
        """
        if self._state.rounds < 1:
            return {}
        place = view.members.index(self._me)
        if self._me == view.first:
            latest = newest(self._inbox.held())
            done = self._state.taken
            return {
                one: Goal(max(latest.get(one, 0), done.get(one, 0)), place=place)
                for one in self._group.sources
            }
        entry = self._post.book.get(int(view.first.machine))
        helper = (int(view.first.machine), (entry.host, entry.port)) if entry else None
        return {
            group: Goal(version, exactly=True, place=place, helper=helper)
            for group, version in self._choosing.aims.items()
            if Model(group, version) not in held and version > self._state.taken.get(group, 0)
        }

    def _constants(self) -> int:
        return checksum(self._state.constants)

    def _decides(self, number: int) -> bool:
        """Whether there is a choice to make for a round."""
        return not number or bool(self._group.sources)

    def _version(self, rounds: int) -> int:
        """Of this group's model after so many rounds."""
        return self._state.taken.get(self._group.number, 0) + rounds

    def _fresh(self) -> list[Model]:
        """What is here and in no round yet, from the one that came first to the last."""
        taken = self._state.taken
        return [one for one in self._inbox.held() if one.version > taken.get(one.group, 0)]

    def _pin(self, view: View, more: Sequence[Model] = ()) -> None:
        """What is offered for the round in hand; on the first member, what it leads others to."""
        mine = self._choosing.mine
        pinned = set(more)
        if mine is not None and (mine.round or 0) >= self._state.rounds:
            pinned.update(mine.models)
        if self._me == view.first:
            pinned.update(self._choosing.led)
        self._inbox.pin(pinned)

    def _repeat_offer(self, view: View) -> None:
        """Until the choice is known."""
        mine = self._choosing.mine
        known = mine is None or self._choosing.chosen(mine.round or 0) is not None
        if mine is not None and not known:
            self._send(view, [view.first], mine)

    def _choose(self, view: View, number: int) -> None:
        choice: Choice | None = self._choosing.choose(view, number)
        if choice is not None:
            self._send(view, view.members, choice)

    def _send(self, view: View, to: Iterable[Member], body: Reply) -> None:
        for one in to:
            if one != self._me:
                self._post.send(one, Message(self._me, view, body))

"""One machine's part in the rounds of its group: who waits for what, and what happens next.

The driver owns the agreement. It hears of letters, deaths, and ends of orders through one queue,
and after each of them it looks at what is to be done next. Four threads carry out orders that take
long: `job` trains, copies and writes; `exchange` joins generations and sums models; `rule` makes
the next state; `fetch` gets one from another machine. What comes from an older generation is
dropped.

    copy      train for a round, then copy the weights                     job
    join      connections of a generation; then what became of the         exchange
              round that the one before had in hand (Mesh.settle)
    sum       the aggregate of all copies                                  exchange
    hold      told to all, for the rule makes the state after the round    rule
              now. Models of other groups that the round takes must be
              known before (neighbours.py)
    write     every member holds it: the job continues from it             job

The first round trains nothing: the first member's weights become those of all.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Iterable

import numpy as np

from gadei_ps.agents import events
from gadei_ps.agents import state as states
from gadei_ps.agents.addresses import Address
from gadei_ps.agents.hearing import Hearing, Lookout, Standing
from gadei_ps.agents.letters import Letter
from gadei_ps.agents.listener import Listener
from gadei_ps.agents.mesh import PIECE_S, SILENCE_S, Mesh
from gadei_ps.agents.neighbours import Group, Neighbours
from gadei_ps.agents.orders import Reached
from gadei_ps.agents.post import Post
from gadei_ps.agents.state import Fetched, Giving, State
from gadei_ps.agents.trains import Owning, Training
from gadei_ps.agents.worker import Done, Worker
from gadei_ps.errors import GadeiError, in_words
from gadei_ps.groups.agreement import Agreement
from gadei_ps.groups.compress import Wire
from gadei_ps.groups.membership import Member, View
from gadei_ps.groups.messages import (
    Apply,
    Decision,
    Expelled,
    Fetch,
    Install,
    Lost,
    Message,
    Model,
    Notice,
    Reply,
    Send,
)
from gadei_ps.groups.rules import Rule

A_SILENCE = 4
"""Letters in the time after which a silent member counts as lost."""
MOST_TICK_S = 5.0
"""Letters may be lost: what is due is said again."""


class Driver:
    """One life of an agent, until `run` returns."""

    def __init__(
        self,
        door: Listener,
        me: Member,
        address: Address,
        training: Training,
        rule: Rule,
        view: View | None,
        *,
        group: Group | None = None,
        wire: Wire = Wire.FLOAT32,
        owning: Owning | None = None,
        silence_s: float = SILENCE_S,
        piece_s: float = PIECE_S,
        start_s: float = 0.0,
        told: Callable[[Standing], None] = lambda standing: None,
    ) -> None:
        """view: the first one, of a group that begins. None: join() is to be called. wire: the
        format of models for other groups. owning: of a group that divides the batches.

        start_s: how much longer the others of a first view may be silent before they are heard.
        told: is called in the thread of `run` when the standing of this machine has changed.
        """
        self.me, self.training = me, training
        self._owning = owning
        shares = owning.shares if owning is not None else None
        self.state = State(rule, training.values, wire, shares, training.buffers)
        self.agreement = Agreement(me, view)
        self.ended: str | None = None
        """Why this life is over; None: it is not."""
        self._silence_s, self._piece_s, self._start_s = silence_s, piece_s, start_s
        self._hearing, self._lookout = Hearing(silence_s), Lookout(silence_s, told)
        self._door = door
        self._events: queue.SimpleQueue[events.Event] = queue.SimpleQueue()
        self._mesh = Mesh(door, int(me.machine), silence_s=silence_s, piece_s=piece_s)
        self._giving = Giving(door, int(me.machine), self.state, piece_s=piece_s)
        tell = self._events.put
        group = group or Group()
        terms = f"{group}, rule {rule} in {wire}"
        terms += f", batches of {shares}" if shares is not None else ""
        self.post = Post(*(door, me, address, self._arrived, tell), terms=terms, piece_s=piece_s)
        self._neighbours = Neighbours(door, me, group, self.state, self.post, tell, piece_s=piece_s)
        self._job, self._exchange, self._fetching, self._rule = (
            Worker(f"agent-{name}", tell) for name in ("job", "exchange", "fetch", "rule")
        )
        self._call = states.Call()
        self._leaves = False
        self._copy, self._out = (np.zeros(training.values, np.float32) for _ in range(2))
        self._samples = 0
        self._copied: int | None = None
        """The round whose copy is in `_copy`."""
        self.written = 0
        """Rounds after which the job has the weights."""
        self._tried = self._joined = -1
        """The generation that was to be joined last; that whose connections there are."""
        self._ruled = Done(("rule", -1), None, None)
        """What the rule did last. With an error, this life ends once all hold that aggregate."""
        self._whole: int | None = None
        """The round whose aggregate is in `_out`, made under the generation `_joined`."""

    def join(self, contacts: Iterable[Member]) -> None:
        """Asks to become a member. The post knows where the contacts can be reached."""
        self._carry_out(self.agreement.join(contacts))

    def leave(self) -> None:
        """Asks to leave after the round in hand. For any thread, or a signal's handler."""
        self._events.put(events.Wish.LEAVE)

    def obey(self, order: Reached | events.GoOn | events.GiveUp) -> None:
        """What the agent is told while it lives. For any thread."""
        if isinstance(order, Reached):
            self._neighbours.learn(order.group, order.book)
        else:
            self._events.put(order)

    def run(self) -> str:
        """Takes part in rounds until this life is over; returns why."""
        tick_s = min(self._silence_s / A_SILENCE, MOST_TICK_S)
        last = looked = time.monotonic()
        if self.agreement.view is not None:
            self._hearing.begin(self.agreement.view.members, last + self._start_s)
        while self.ended is None:
            self._lookout.look(self.agreement, self.post.refusals)
            self._next()
            due = min(last + tick_s, looked + self.training.look_s)
            if (left := due - time.monotonic()) > 0:
                with contextlib.suppress(queue.Empty):
                    self._hear(self._events.get(timeout=left))
            now = time.monotonic()
            if now >= looked + self.training.look_s:
                self._look_at_job()
                looked = now
            if now >= last + tick_s:
                self._tick(now, stood_still_s=now - last - tick_s)
                last = now
        return self.ended

    def close(self, wait_s: float = 0.0) -> bool:
        """Ends what can be ended; returns whether nothing uses `training` any more.

        wait_s: for what it is asked to do now. Other orders under way end with the process.
        """
        self._neighbours.close()
        self.post.close()
        self._giving.close()
        self._fetching.close()
        self._rule.close()
        if self._exchange.close():
            self._mesh.close()
        return self._job.close(wait_s)

    # -- events -----------------------------------------------------------------------------------

    def _arrived(self, letter: Letter) -> None:
        """A letter, in any thread. It is lost if too many wait: what is due will be said again."""
        if self._events.qsize() < events.MOST_WAITING:
            self._events.put(letter)

    def _hear(self, event: events.Event) -> None:
        if isinstance(event, Letter) and event.terms != self.post.terms:
            self._hear_stranger(event)
        elif isinstance(event, Letter):
            sender = event.message.sender
            self.post.learn(event.book, int(sender.machine))
            if self._hearing.hear(sender):
                self._carry_out(self.agreement.heard(sender))
            self._carry_out(self.agreement.receive(event.message))
            self._hear_of_models(event.message)
        elif isinstance(event, Model):
            self._look()
        elif isinstance(event, Done):
            self._end_of(event)
        elif isinstance(event, events.Wish):
            self._leaves = True
            self._ask_to_leave()
        elif isinstance(event, events.GoOn | events.GiveUp):
            self._carry_out(event.tell(self.agreement))
        else:
            self._carry_out(self.agreement.dead(event))

    def _hear_stranger(self, letter: Letter) -> None:
        """A machine that joins, or begins, hears that it has other settings; others go on."""
        theirs, mine = letter.message, self.agreement
        number = int(theirs.sender.machine)
        members = mine.view.members if mine.view is not None else ()
        if theirs.view is None:
            if number in letter.book and all(int(one.machine) != number for one in members):
                self.post.learn({number: letter.book[number]}, number)
            self.post.send(theirs.sender, Message(self.me, mine.view, Notice()))
        elif mine.view is None or not mine.applied:
            self.ended = events.not_alike(self.post.terms, number, letter.terms)

    def _hear_of_models(self, message: Message) -> None:
        """Of the present generation; the agreement has taken over the view of later ones."""
        view = self.agreement.view
        if isinstance(message.body, Reply) and view is not None and message.view == view:
            self._neighbours.hear(view, message.sender, message.body)

    def _look(self, *, again: bool = False) -> None:
        view = self.agreement.view
        if view is not None and not self.agreement.expelled:
            self._neighbours.look(view, again=again)

    def _ask_to_leave(self) -> None:
        """Alone, a machine leaves at once; otherwise when another one has the group's state."""
        view = self.agreement.view
        if view is None or view.members == (self.me,):
            self.ended = events.LEFT
        else:
            self._carry_out(self.agreement.leave())

    def _look_at_job(self) -> None:
        try:
            self.training.check()
        except GadeiError as error:
            self.ended = self.ended or events.of_job(error)

    def _tick(self, now: float, *, stood_still_s: float) -> None:
        """Looks for silence, and repeats what is due. stood_still_s: this process itself."""
        view = self.agreement.view
        others = [one for one in view.members if one != self.me] if view is not None else []
        for member in self._hearing.silent(others, now, stood_still_s):
            self._carry_out(self.agreement.silent(member))
        self._carry_out(self.agreement.again())
        self._look(again=True)

    def _carry_out(self, decisions: list[Decision]) -> None:
        for one in decisions:
            if isinstance(one, Send):
                self.post.send(one.to, one.message)
            elif isinstance(one, Install):
                self._call.give_up()  # a fetch under the last view
                self._hearing.keep(one.view.members)
                self._look()
            elif isinstance(one, Fetch):
                self._fetch(one.source)
            elif isinstance(one, Apply):
                # `_next` finds that more rounds are applied than written.
                self._neighbours.applied(one.round + 1)
                if self._leaves:  # another change came first; now others have the state, too
                    self._ask_to_leave()
            elif isinstance(one, Expelled):
                self.ended = events.LEFT if self._leaves else events.without(self.agreement)
            elif isinstance(one, Lost):
                self.ended = events.LOST

    # -- orders -----------------------------------------------------------------------------------

    def _next(self) -> None:
        """Gives the orders that can be given now."""
        agreement, view = self.agreement, self.agreement.view
        if view is None or agreement.expelled or self.ended is not None:
            return
        if self._ruled.error is not None and self._ruled.tag[1] < (agreement.applied or 0):
            self.ended = in_words(self._ruled.error)
            return
        self._hold(view)
        rounds = agreement.applied
        if not self._exchange.busy and not agreement.frozen:
            if self._tried != view.generation:
                self._order_join(view)
            elif self._joined != view.generation:
                pass  # its exchange has failed: the next generation is to come
            elif rounds is not None and self._can_sum(rounds):
                self._order_sum(view, rounds)
        if self._job.busy or rounds is None or agreement.lacks:
            return
        if self.written < rounds:
            if self.state.rounds == rounds and not self._sums:
                self._order_write(rounds)
        elif self._copied != rounds and not agreement.holds:
            self._job.order(("copy", rounds), lambda: self.training.copy(rounds, self._copy))

    @property
    def _sums(self) -> bool:
        """Whether an exchange reads the copy."""
        return self._exchange.busy and self._exchange.tag[0] == "sum"

    def _can_sum(self, rounds: int) -> bool:
        """Whether this machine has its share of the round in hand, and no result of it."""
        has_result = self.agreement.holds or self._whole is not None
        return self._copied == rounds == self.written and not (has_result or self.agreement.lacks)

    def _hold(self, view: View) -> None:
        """Takes the aggregate that is here, if the agreement does."""
        agreement, number = self.agreement, self._whole
        if number is None or self._joined != view.generation or number != agreement.applied:
            return
        if agreement.frozen or agreement.holds or agreement.lacks or self._rule.busy:
            return
        self._neighbours.offer(view, number)
        taken, said = self._neighbours.take(view, number), self._mesh.said
        if taken is None:
            return

        def advance() -> None:
            with taken.held:
                self.state.advance(self._out, taken.weights, taken.models, said)
            self._neighbours.made()

        self._whole = None
        self._rule.order(("rule", number), advance)
        self._carry_out(agreement.complete(view.generation, number))

    def _order_join(self, view: View) -> None:
        entries = {one: self.post.book.get(int(one.machine)) for one in view.members}
        if any(it is None or it.incarnation != one.incarnation for one, it in entries.items()):
            return  # a letter will tell, or a later life has come and the view will change
        addresses = {int(one.machine): (it.host, it.port) for one, it in entries.items() if it}
        self._whole = None

        def given_up() -> bool:
            return self.agreement.view is not view

        def join() -> bool:
            # Views count from 0, generations of the data plane from 1.
            values = self.training.values
            self._mesh.join(view.generation + 1, addresses, values, given_up=given_up)
            return self._mesh.settle(view.settled, self._out)

        self._tried, self._joined = view.generation, -1
        self._exchange.order(("join", view.generation, view.settled), join)

    def _order_sum(self, view: View, number: int) -> None:
        self.agreement.begin()
        self._neighbours.offer(view, number)
        samples, said = self._samples, self._owning.said if self._owning is not None else None
        if not number:  # the first member's weights are those of all
            samples = min(samples, int(view.first == self.me))

        def aggregate() -> bool:
            self._mesh.aggregate(number, self._copy, self._out, samples=samples, said=said)
            return True

        self._exchange.order(("sum", view.generation, number), aggregate)

    def _order_write(self, rounds: int) -> None:
        self._copied = None

        def write() -> None:
            with self.state.lock:
                np.copyto(self._copy, self.state.weights)
                shares = self.state.shares.copy() if self.state.shares is not None else None
            self.training.write(rounds, self._copy, self.state.constants)
            if self._owning is not None and shares is not None:
                self._owning.own(shares)

        self._job.order(("write", rounds), write)

    def _fetch(self, source: Member) -> None:
        view, number = self.agreement.view, int(source.machine)
        entry = self.post.book.get(number)
        if view is None or entry is None or self._fetching.busy:
            return
        if not view.settled:  # before the first round has ended there is no state
            self._carry_out(self.agreement.fetched(view.generation))
            return

        call = self._call = states.Call()

        def fetch() -> Fetched:
            return states.fetch(
                (entry.host, entry.port),
                me=int(self.me.machine),
                source=number,
                rounds=view.settled,
                like=self.state,
                identity=self._door.identity,
                contexts=self._door.contexts,
                piece_s=self._piece_s,
                call=call,
            )

        self._fetching.order(("fetch", view.generation), fetch)

    def _end_of(self, done: Done) -> None:
        kind, *tag = done.tag
        if kind in ("copy", "write"):
            self._job.ended()
            self._end_of_training(kind, tag[0], done)
        elif kind == "rule":
            self._rule.ended()
            self._ruled = done
            self._look()
        elif kind == "fetch":
            self._fetching.ended()
            self._end_of_fetch(tag[0], done)
        else:
            self._exchange.ended()
            self._end_of_exchange(tag[0], tag[1], done)

    def _end_of_training(self, kind: str, number: int, done: Done) -> None:
        if done.error is not None:
            self.ended = events.of_job(done.error)
        elif kind == "copy":
            self._copied, self._samples = number, done.result
        else:
            self.written = number

    def _end_of_fetch(self, generation: int, done: Done) -> None:
        """A fetch that has failed is asked for again, by the agreement."""
        view = self.agreement.view
        wanted = view is not None and view.generation == generation and self.agreement.lacks
        if events.is_final(done.error):
            self.ended = events.why(done.error)
        elif done.error is None and wanted and not self.agreement.frozen:
            self.state.take(done.result)
            self._carry_out(self.agreement.fetched(generation))
            self._look()

    def _end_of_exchange(self, generation: int, number: int, done: Done) -> None:
        # Where there is a state, its size is right: a machine with another one ends as it fetches.
        if events.is_final(done.error) and not (number and events.is_other_size(done.error)):
            self.ended = events.why(done.error)
        elif done.error is not None:
            self._joined = -1
            self._carry_out(self.agreement.broken(generation))
        else:
            self._joined = generation
            self._whole = number if done.result else None

"""How the machines of a group agree on the next view and on the end of each round.

Each machine drives one `Agreement`. Events go in: a message, a death, silence, a whole result.
Decisions come out, in the order in which they are to be carried out: messages to send, a view to
install, a round to apply. Nothing here waits or looks at a clock. Messages may be lost, doubled,
delayed and overtaken; the driver calls `again` from time to time, which repeats what is due.

The next view is agreed on by Paxos (Lamport 1998) among the members of the present one, with the
quorums of `membership.is_quorum`. A member that promises to hear a proposal also stops working
under the present view: its answer says what it holds, and stays true. So no round can end behind
the back of the members that decide what becomes of it.

The first member that is not silent makes the proposals. It waits for every member that it hears, so
that a slow one is not left out.

Where fewer than half of the members are left, they stand until whoever has started the machines
says `go_on`: it alone knows that no machine lives which the dead have taken in meanwhile.

Where nothing says for certain that a silent machine is dead, a person may: `give_up`. The others
then make the next view without it, under a much later generation, and tell it of each view that
they have. So whatever the person has overlooked that lives, it joins again, and one group remains.

What was agreed on by half before must stay as it is, also where its members are given up then. So
two sides that have given up each other can come to two views of one generation. Each tells the
other of it, and `View.rank` says which one remains. A machine works under no view but one that
follows its own, of which it has all results.
"""

from __future__ import annotations

from collections.abc import Iterable

from gadei_ps.groups.lives import Lives
from gadei_ps.groups.membership import MOST_MEMBERS, Answer, Member, View, can_work, is_quorum
from gadei_ps.groups.messages import (
    Accept,
    Accepted,
    Apply,
    Ballot,
    Body,
    Decision,
    Expelled,
    Fetch,
    Install,
    Join,
    Leave,
    Lost,
    Message,
    Notice,
    Prepare,
    Promise,
    Ready,
    Refused,
    Reply,
    Send,
)
from gadei_ps.groups.proposal import Proposal
from gadei_ps.groups.wishes import Wishes


class Agreement:
    """One machine's share in the agreement of its group."""

    def __init__(self, me: Member, view: View | None = None, most: int = MOST_MEMBERS) -> None:
        """view: the first view of a group that begins, the same on all its machines, in which all
        have the same weights. None: the machine is to join. most: members that there may be; who
        asks to join a full group waits until a place is free."""
        self.me = me
        self.view = view
        self._most = most
        self.applied: int | None = None if view is None else view.settled
        self.holds = False
        self.expelled = False
        self._contacts: tuple[Member, ...] = ()
        self._lives = Lives()
        self._wishes = Wishes()
        self._working = False
        self._out: list[Decision] = []
        self._fetches = 0
        self._reset()

    # -- events -----------------------------------------------------------------------------------

    def join(self, contacts: Iterable[Member]) -> list[Decision]:
        """The machine wants to become a member of the group to which these belong."""
        self._contacts = tuple(contacts)
        return self.again()

    def leave(self) -> list[Decision]:
        """The machine wants to leave. It works on until it gets `Expelled`.

        An `Install` instead means that nobody else has the group's state, or that another change
        came first: it may ask again.
        """
        self._wishes.leaving.add(self.me)
        self._tell(Leave(self.me))
        self._consider()
        return self._decided()

    def dead(self, member: Member) -> list[Decision]:
        """It is certain that this life of a machine has ended."""
        self._lives.end(member)
        return self.silent(member)

    def give_up(self, machine: str) -> list[Decision]:
        """Somebody vouches that this machine is dead, of which nothing is heard.

        Should it live, it is told to join again once there is a view without it.
        """
        for one in self.view.members if self.view is not None else ():
            if one.machine == machine:
                self._lives.give_up(one)
        self._advance()
        return self._decided()

    def silent(self, member: Member) -> list[Decision]:
        """Nothing is heard from this member."""
        self._lives.silent.add(member)
        self._wishes.joining.discard(member)
        self._advance()
        self._consider()
        return self._decided()

    def heard(self, member: Member) -> list[Decision]:
        """Something is heard again from a member that was silent."""
        self._lives.hear(member)
        return self._decided()

    def begin(self) -> None:
        """The aggregation of the next round begins here: joins and leaves wait until it has ended.

        Deaths do not wait.
        """
        self._working = True

    def complete(self, generation: int, number: int) -> list[Decision]:
        """The whole result of round `number`, made under this generation, has arrived here.

        If the machine has stopped working under that generation, the result is not to be used.
        """
        present = self.view is not None and self.view.generation == generation
        if present and self.applied == number and not self.frozen and not self.holds:
            self.holds = True
            self._ready()
        return self._decided()

    def fetched(self, generation: int) -> list[Decision]:
        """The state after this view's settled rounds has arrived here."""
        if self.view and self.view.generation == generation and not self.frozen and self.lacks:
            settled = self.view.settled
            # Held, not applied: another member may lack it, and then it might be made again.
            self.holds = settled > 0
            self.applied = max(settled - 1, 0)
            self._ready()
        return self._decided()

    def broken(self, generation: int) -> list[Decision]:
        """The exchange of this generation has failed here, though perhaps nobody has died.

        The next view begins it anew, with all members that answer.
        """
        if self.view and self.view.generation == generation and not self.expelled:
            self._broken = True
            if not self._leads():
                self._tell(Notice(wanted=True))
            self._consider()
        return self._decided()

    def go_on(self, generation: int) -> list[Decision]:
        """Whoever has started all machines says that none that lives has a later view than this.

        Its members decide then, however few they are. Who waits under an older one is expelled.
        """
        if self.view is not None and self.view.generation == generation:
            self._entrusted = True
            self._advance()
        elif self.view is not None and self.view.generation < generation and self.missing:
            self.expelled = True
            self._out.append(Expelled())
        return self._decided()

    def again(self) -> list[Decision]:
        """Repeats what is due. To be called from time to time, such as with each sign of life."""
        if self.expelled:
            return []
        if self.view is None:
            for one in self._contacts:
                self._send(one, Join(self.me))
            return self._decided()
        unnamed = self._lives.vouched.difference(self.view.members)
        for one in (*self.view.given_up, *unnamed):
            self._send(one, Notice())
        if self._own.phase:
            self._ask()
        elif self.frozen:
            if self._leads():
                self._propose()
            else:
                self._tell(Notice(wanted=True))
        else:
            self._tell(Ready(self._reach()))
            if self._broken and not self._leads():
                self._tell(Notice(wanted=True))
            if self.me in self._wishes.leaving:
                self._tell(Leave(self.me))
            self._fetch()
            self._consider()
        return self._decided()

    def receive(self, message: Message) -> list[Decision]:
        """A message of another machine. One that is expelled still tells others of the view."""
        theirs, body, sender = message.view, message.body, message.sender
        if self.expelled:
            if theirs is not None and self.view and theirs.generation < self.view.generation:
                self._send(sender, Notice())
            return self._decided()
        if (
            theirs is not None
            and (self.view is None or theirs.rank > self.view.rank)
            # What a machine has, it drops only for one that works under the other view.
            and (can_work(self.me, self.applied, self.view, theirs) or sender in theirs.members)
        ):
            self._install(theirs)
        if self.view is None:
            return self._decided()
        if isinstance(body, Join):
            if sender == body.member:  # the others hear of it from here
                self._tell(body)
            self._welcome(body.member)
        elif theirs is None or theirs.rank < self.view.rank:
            self._send(sender, Notice())  # it has missed this view
        elif not self.expelled and theirs == self.view:
            self._hear(sender, body)
        self._consider()
        return self._decided()

    @property
    def frozen(self) -> bool:
        """Whether the machine has stopped working under its view, because the next one is near."""
        return self._promised is not None

    @property
    def lacks(self) -> bool:
        """Whether results of settled rounds are missing here, so that they are to be fetched."""
        return self.view is not None and self._reach() < self.view.settled

    @property
    def missing(self) -> tuple[Member, ...]:
        """Members that this machine's proposal waits for: that may live, or else all dead ones."""
        if self.view is None or not self._own.phase or self._is_quorum:
            return ()
        missing = tuple(one for one in self.view.members if one not in self._own.answered)
        return tuple(one for one in missing if one not in self._lives.dead) or missing

    @property
    def stands(self) -> bool:
        """Whether the missing are certainly dead: then those that are left need `go_on`."""
        return bool(self.missing) and self._lives.dead.issuperset(self.missing)

    @property
    def hears(self) -> tuple[Member, ...]:
        """Other members that are not silent."""
        members = self.view.members if self.view is not None else ()
        return tuple(one for one in members if one not in self._lives.silent and one != self.me)

    @property
    def doubts(self) -> tuple[Member, ...]:
        """Members of which nothing is heard, and that may live."""
        members = self.view.members if self.view is not None else ()
        silent = self._lives.silent - self._lives.dead
        return tuple(one for one in members if one in silent)

    # -- the present view -------------------------------------------------------------------------

    def _reset(self) -> None:
        """Forgets all that belongs to one generation."""
        self._broken = self._entrusted = False
        self._promised: Ballot | None = None
        self._accepted: tuple[Ballot, View] | None = None
        self._own = Proposal()
        self._reached: dict[Member, int] = {}

    def _reach(self) -> int:
        return Answer(self.applied, self.holds).reach

    def _install(self, view: View) -> None:
        if not can_work(self.me, self.applied, self.view, view):
            self.expelled = self.view is not None  # a machine that joins waits for a later view
            if self.expelled:
                self.view = view
                self._out.append(Expelled())
            return
        self.view = view
        self._working = False
        self._lives.keep(view)
        self._wishes.keep(view)
        self._reset()
        self._out.append(Install(view, self.lacks))
        self._ready()

    def _ready(self) -> None:
        """Tells how far this machine is, and applies what all hold."""
        self._reached[self.me] = self._reach()
        if not self.lacks:
            self._tell(Ready(self._reach()))
        self._apply()

    def _apply(self) -> None:
        if self.view is None or self.applied is None or not self.holds or self.frozen:
            return
        wanted = self.applied + 1
        if all(self._reached.get(one, -1) >= wanted for one in self.view.members):
            self._out.append(Apply(self.applied))
            self.applied, self.holds, self._working = wanted, False, False

    def _fetch(self) -> None:
        if self.view and self.lacks and not self.frozen:
            have = [one for one, far in self._reached.items() if far >= self.view.settled]
            live = [one for one in self.hears if one in have]
            if live:
                # Each time another one, should the one before not answer.
                self._out.append(Fetch(live[self._fetches % len(live)]))
                self._fetches += 1

    # -- the next view ----------------------------------------------------------------------------

    def _hear(self, sender: Member, body: Body | Reply) -> None:
        """A message of the same view."""
        if isinstance(body, Ready):
            if not self.frozen:
                first = sender not in self._reached
                self._reached[sender] = max(body.rounds, self._reached.get(sender, -1))
                self._apply()
                if first:
                    self._fetch()
        elif isinstance(body, Prepare | Accept) and body.ballot < (self._promised or body.ballot):
            assert self._promised is not None
            self._send(sender, Refused(self._promised))
        elif isinstance(body, Prepare):
            self._promised = body.ballot
            answer = Answer(self.applied, self.holds)
            self._send(sender, Promise(body.ballot, answer, self._accepted))
        elif isinstance(body, Promise):
            if self._own.phase == 1 and body.ballot == self._own.ballot:
                self._own.promises[sender] = body
                self._advance()
        elif isinstance(body, Accept):
            self._promised, self._accepted = body.ballot, (body.ballot, body.view)
            self._send(sender, Accepted(body.ballot))
        elif isinstance(body, Accepted):
            if self._own.phase == 2 and body.ballot == self._own.ballot:
                self._own.agreed.add(sender)
                self._advance()
        elif isinstance(body, Refused):
            self._own.give_way(body.promised)
        elif isinstance(body, Leave):
            self._wishes.leaving.add(body.member)
        elif isinstance(body, Notice) and body.wanted and self._leads() and not self._own.phase:
            self._propose()

    def _welcome(self, member: Member) -> None:
        """Someone asks to join."""
        assert self.view is not None
        if member in self.view.members:
            self._send(member, Notice())
        elif member not in self._lives.dead:
            self._wishes.joining.add(member)
            for one in self.view.members:
                if one.machine == member.machine and one < member:  # an earlier life has ended
                    self._lives.end(one)
            self._advance()

    def _leads(self) -> bool:
        """Whether it is for this machine to make proposals."""
        assert self.view is not None
        ours = (self.me, *self.hears)
        return next(one for one in self.view.members if one in ours) == self.me

    def _consider(self) -> None:
        """Proposes a new view if there is a reason."""
        if self.expelled or self.view is None or self._own.phase or self.frozen:
            return
        if not self._leads():
            return
        gone = self._broken or any(one in self._lives.silent for one in self.view.members)
        if gone or (self._wishes.ask(self.view, self._most) and not self._working):
            self._propose()

    def _propose(self) -> None:
        assert self.view is not None
        self._own.begin(self._promised, self.view.members.index(self.me))
        self._ask()

    def _ask(self) -> None:
        """Sends the present question to those that have not answered; to itself first."""
        assert self.view is not None
        body = self._own.question
        waiting = [one for one in self.view.members if one not in self._own.answered]
        self._tell(body, [one for one in waiting if one != self.me])
        if self.me in waiting:
            self._hear(self.me, body)

    @property
    def _is_quorum(self) -> bool:
        assert self.view is not None
        answered, dead = self._own.answered, self._lives.dead
        return is_quorum(self.view, answered, dead, entrusted=self._entrusted)

    def _advance(self) -> None:
        """Takes the next step of the own proposal, if enough have answered."""
        own = self._own
        if not own.phase or self.view is None or not self._is_quorum:
            return
        if own.phase == 2:
            assert own.chosen is not None
            both = dict.fromkeys((*self.view.members, *own.chosen.members))
            told, chosen = [one for one in both if one != self.me], own.chosen
            self._install(chosen)
            for one in told:
                self._out.append(Send(one, Message(self.me, chosen, Notice())))
            return
        if any(one not in own.answered for one in self.hears):
            return
        changes = self._wishes.changes(self._lives.vouched)
        if own.choose(self.view, changes, self._most, entrusted=self._entrusted):
            self._ask()
        else:
            self._out.append(Lost())

    # -- messages ---------------------------------------------------------------------------------

    def _send(self, to: Member, body: Body) -> None:
        if to == self.me:
            self._hear(to, body)
        else:
            self._out.append(Send(to, Message(self.me, self.view, body)))

    def _tell(self, body: Body, members: Iterable[Member] | None = None) -> None:
        """Sends to these, or to all other members."""
        if members is None:
            members = self.view.members if self.view else ()
        for one in members:
            if one != self.me:
                self._send(one, body)

    def _decided(self) -> list[Decision]:
        out, self._out = self._out, []
        return out
